#include "model/shape.h"

#include "model/shapes/qwen36_35b_a3b.h"

#include "model/shape_table.h"
