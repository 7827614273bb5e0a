/* From a body to tokens, beside the running model: a bad request, or one that the context cannot
 * hold, is answered at once and not when its turn comes. */
#ifndef LILY_SERVE_INTAKE_H
#define LILY_SERVE_INTAKE_H

/* Thread body; arg is the struct server. Returns when the server stops. */
void *intake_main(void *arg);

#endif
