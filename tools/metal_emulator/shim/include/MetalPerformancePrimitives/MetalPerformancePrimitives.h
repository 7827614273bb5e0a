#if __METAL_VERSION__ < 400
#error "MetalPerformancePrimitives: expected language version 4.0"
#endif
// The front end puts shim/matmul.h before the text when it finds this line.
#pragma msl_matmul
