/* An older card in place of this one: what the backend asks the driver about the card is answered
 * as one of that capability would. With CUDA_FORCE_PTX_JIT=1 the driver then compiles the kernels
 * that such a card gets, from PTX, for the card that is there. */
#include "backend/cuda/driver.h"
#include "check.h"

static int capability;
static CUresult (*of_the_card)(int *value, int attribute, CUdevice device);

static CUresult pretend(int *value, int attribute, CUdevice device) {
    CUresult result = of_the_card(value, attribute, device);
    if (result != 0) return result;
    if (attribute == CU_CAPABILITY_MAJOR) *value = capability / 10;
    if (attribute == CU_CAPABILITY_MINOR) *value = capability % 10;
    if (attribute == CU_SHARED_PER_BLOCK_OPTIN) *value = 99 << 10; /* the least of 8.0 to 12.0 */
    return result;
}

int pretend_capability(int tens, lily_err *err) {
    /* The table is the process's own; only its users see it as constant. */
    struct cuda_driver *d = (struct cuda_driver *)cuda_driver_open(err);
    if (!d) return LILY_EBACKEND;
    capability = tens;
    of_the_card = d->device_attribute;
    d->device_attribute = pretend;
    return LILY_OK;
}
