#define INFINITY    __builtin_inff()
#define NAN         __builtin_nanf("")
#define isfinite(x) __builtin_isfinite(x)
#define isnan(x)    __builtin_isnan(x)
double pow(double x, double y);
double exp(double x);
double log(double x);
double sqrt(double x);
double fabs(double x);
double fmax(double a, double b);
double fmin(double a, double b);
double cos(double x);
double sin(double x);
float expf(float x);
float cosf(float x);
float sinf(float x);
float sqrtf(float x);
float fabsf(float x);
float fmaxf(float a, float b);
float fminf(float a, float b);
