// The Metal standard library for clang-19 on Linux, as far as kernels under test use it. No header
// of the C++ library is included: its names would meet those of metal::. What is missing here is
// missing on purpose and stops the compilation.
#pragma once

#include "runtime.h" // before the words of Metal become macros

#ifdef MSL_CHECK_ADDRESS_SPACES
// A second, syntax-only pass: a pointer that loses or changes its address space is an error.
#define device                   __attribute__((address_space(1)))
#define constant                 const __attribute__((address_space(2)))
#define threadgroup              __attribute__((address_space(3)))
#define MSL_THREADGROUP_VARIABLE static __attribute__((address_space(3)))
#else
#define device
#define constant const
#define threadgroup
// A section of its own, so that the executor can tell threadgroup memory from the rest.
#define MSL_THREADGROUP_VARIABLE __attribute__((section("tgmem"))) static
#endif
#define thread
#define METAL_FUNC inline __attribute__((always_inline))

#include "types.h"

#include "math.h"

#include "simd.h"

#include "matrix.h"

#include "atomic.h"

#include "entry.h"
