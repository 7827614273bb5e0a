/* The one thread that runs the model: it takes the queued jobs in order. */
#ifndef LILY_SERVE_WORKER_H
#define LILY_SERVE_WORKER_H

/* Thread body; arg is the struct server. Returns when the server stops and no job runs. */
void *worker_main(void *arg);

#endif
