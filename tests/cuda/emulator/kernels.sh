#!/bin/sh
# Writes the C++ source that compiles one kernel file for one shape and adds its kernels, as named
# in the tables of src/backend/cuda, to the emulated card: kernels.sh <shape> <file> [<header>]
set -eu
echo '#include "emulator.h"'
echo "#define SHAPE_HEADER \"${3:-model/shapes/$1.h}\""
echo "namespace $1_$2 {"
echo "#include \"backend/cuda/kernels/$2.cu\""
echo 'struct Adder {'
echo '    Adder() {'
sed -n "s/.*XX([^,]*, \"$2\", \"\([a-z_0-9]*\)\".*/        emulator::add(\"$1\/$2\", \"\1\", \1);/p" \
    src/backend/cuda/layers.c src/backend/cuda/batch.c | sort -u
echo '    }'
echo '} adder;'
echo '}'
