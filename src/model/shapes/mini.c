#include "model/shape.h"

#include "model/shapes/mini.h"

#include "model/shape_table.h"
