/* The emulated GPU: runs committed command buffers, queue by queue in order, an encoder or an event
 * at a time, inside whichever call of the host lets it. */
#include "internal.h"

#include <dirent.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static struct emu_queue *queues;
static struct {
    uint32_t skip, after;
    NSInteger code;
    bool poison, armed;
} injected;
static uint32_t no_memory_skip;
static bool no_memory;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void emu_queue_link(struct emu_queue *queue) {
    queue->next = queues;
    queues = queue;
}

void emu_queue_unlink(struct emu_queue *queue) {
    struct emu_queue **at = &queues;
    while (*at != queue) at = &(*at)->next;
    *at = queue->next;
}

/* ---- Injection ---- */

void metal_emu_inject(uint32_t skip, long error_code, uint32_t dispatches, bool poison) {
    emu_lock();
    injected.skip = skip;
    injected.code = error_code;
    injected.after = dispatches;
    injected.poison = poison;
    injected.armed = skip != UINT32_MAX;
    emu_unlock();
}

void metal_emu_inject_no_memory(uint32_t skip) {
    emu_lock();
    no_memory_skip = skip;
    no_memory = skip != UINT32_MAX;
    emu_unlock();
}

bool emu_inject_memory(void) {
    if (!no_memory) return false;
    if (no_memory_skip == 0) return true;
    no_memory_skip--;
    return false;
}

static void inject_take(struct emu_command_buffer *commands) {
    if (!injected.armed || injected.skip-- > 0) return;
    injected.armed = false;
    commands->fails = true;
    commands->fail_code = injected.code;
    commands->fail_after = injected.after;
    commands->fail_poisons = injected.poison;
}

/* ---- The end of a command buffer ---- */

static void finish(struct emu_command_buffer *commands) {
    struct emu_queue *queue = commands->queue;
    emu_buffers_in_flight(commands, false);
    emu_buffers_collect_writes();
    emu_stages_assign(commands);
    emu_graph_record(commands);
    queue->head = commands->next;
    if (!queue->head) queue->tail = NULL;
    for (size_t i = 0; commands->retains && i < commands->held_count; i++) {
        objc_release(commands->held[i]);
    }
    commands->held_count = 0;
    objc_release(&commands->object);
}

void emu_gpu_fail(struct emu_command_buffer *commands, NSInteger code, const char *text) {
    commands->error = (struct emu_error *)emu_error_new(code, text);
    commands->status = MTLCommandBufferStatusError;
    commands->end = now();
    if (commands->fail_poisons) commands->queue->poisoned = true;
    finish(commands);
}

/* ---- Running ---- */

static bool released_in_use(const struct emu_command_buffer *commands) {
    for (size_t i = 0; i < commands->held_count; i++) {
        if (emu_is_dead(commands->held[i])) return true;
    }
    return false;
}

static void report_faults(const struct emu_dispatch *dispatch) {
    for (size_t i = 0; i < dispatch->report->fault_count; i++) {
        const msl_fault *fault = &dispatch->report->faults[i];
        emu_find(METAL_EMU_KERNEL, "%s: %s", msl_fault_name(fault->kind), fault->text);
    }
}

/* Runs one dispatch; a number to fail the command buffer with, or 0. */
static NSInteger run_dispatch(struct emu_command_buffer *commands, struct emu_dispatch *dispatch) {
    if (commands->fails && commands->dispatches_run >= commands->fail_after) {
        return commands->fail_code;
    }
    commands->dispatches_run++;
    MTLSize groups = dispatch->groups, threads = dispatch->threads;
    if (dispatch->indirect) {
        uint32_t grid[3];
        memcpy(grid, dispatch->indirect->base + dispatch->indirect_offset, sizeof grid);
        groups = (MTLSize){grid[0], grid[1], grid[2]};
        dispatch->groups = groups;
        if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0) return 0; /* legal: nothing to do */
    }
    msl_dispatch run = {.seed = emu_options.seed};
    run.grid = (msl_size){(uint32_t)(groups.width * threads.width),
                          (uint32_t)(groups.height * threads.height),
                          (uint32_t)(groups.depth * threads.depth)};
    run.group =
        (msl_size){(uint32_t)threads.width, (uint32_t)threads.height, (uint32_t)threads.depth};
    for (size_t i = 0; i < MSL_MAX_BUFFERS; i++) {
        const struct emu_binding *binding = &dispatch->bindings[i];
        void *base = binding->buffer ? (void *)binding->buffer->base : (void *)binding->bytes;
        run.buffers[i] = (msl_buffer){base, binding->length, binding->offset};
    }
    memcpy(run.tg_length, dispatch->threadgroup, sizeof run.tg_length);
    char *message = calloc(1, MSL_MESSAGE_MAX);
    if (!message) abort();
    emu_in_kernel = true;
    int rc = msl_dispatch_run(dispatch->pipeline->pipeline, &run, &dispatch->report, message);
    emu_in_kernel = false;
    if (rc != 0) emu_find(METAL_EMU_KERNEL, "%s: %s", dispatch->pipeline->kernel->name, message);
    free(message);
    if (rc != 0) return MTLCommandBufferErrorInternal;
    report_faults(dispatch);
    return 0;
}

static uint64_t mixed(uint64_t x) { /* the splitmix64 finaliser */
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

struct turn {
    struct emu_dispatch *dispatch;
    uint64_t draw;
};

static int by_stage(const void *a, const void *b) {
    const struct turn *x = a, *y = b;
    if (x->dispatch->stage != y->dispatch->stage) {
        return x->dispatch->stage < y->dispatch->stage ? -1 : 1;
    }
    return x->draw < y->draw ? -1 : x->draw > y->draw;
}

/* Runs the encoder that begins at commands->at. With a seed, dispatches that no barrier orders run
 * in an order drawn from it: what is ordered has ascending stages. */
static NSInteger run_encoder(struct emu_command_buffer *commands) {
    size_t first = commands->at, last = first, count = 0;
    while (commands->commands[last].kind != EMU_END) {
        count += commands->commands[last++].kind == EMU_DISPATCH;
    }
    struct turn *turns = calloc(count + 1, sizeof *turns);
    if (!turns) abort();
    count = 0;
    for (size_t i = first; i < last; i++) {
        if (commands->commands[i].kind != EMU_DISPATCH) continue;
        turns[count].dispatch = commands->commands[i].dispatch;
        turns[count].draw = emu_options.seed ? mixed(emu_options.seed ^ i) : i;
        count++;
    }
    if (emu_options.seed) qsort(turns, count, sizeof *turns, by_stage);
    NSInteger code = 0;
    emu_buffers_protect(commands, false);
    for (size_t i = 0; i < count && code == 0; i++)
        code = run_dispatch(commands, turns[i].dispatch);
    emu_buffers_protect(commands, true);
    free(turns);
    emu_hazards_check(commands, first, last);
    commands->at = last + 1;
    return code;
}

static void complete(struct emu_command_buffer *commands) {
    double took = now() - commands->start;
    if (emu_options.seconds) {
        took = emu_options.seconds(emu_options.seconds_arg, commands->label ? commands->label : "");
    } else if (emu_options.seconds_per_dispatch > 0) {
        took = emu_options.seconds_per_dispatch * commands->dispatches_run;
    }
    commands->end = commands->start + took;
    commands->queue->busy_until = commands->end;
    if (commands->fails) {
        emu_gpu_fail(commands, commands->fail_code, "injected error");
    } else if (emu_options.watchdog_seconds > 0 && took > emu_options.watchdog_seconds) {
        emu_gpu_fail(commands, MTLCommandBufferErrorTimeout, "the command buffer ran too long");
    } else {
        commands->status = MTLCommandBufferStatusCompleted;
        finish(commands);
    }
}

/* false when the command buffer cannot start: it has ended with an error. */
static bool start(struct emu_command_buffer *commands) {
    commands->status = MTLCommandBufferStatusScheduled;
    commands->start = now();
    if (commands->start < commands->queue->busy_until) {
        commands->start = commands->queue->busy_until;
    }
    if (commands->queue->poisoned) {
        emu_gpu_fail(commands, MTLCommandBufferErrorAccessRevoked,
                     "ignored, for an earlier error of this queue");
        return false;
    }
    if (emu_allocated_bytes() > emu_options.working_set) {
        emu_gpu_fail(commands, MTLCommandBufferErrorOutOfMemory, "insufficient memory");
        return false;
    }
    emu_stages_assign(commands); /* the random order needs them */
    return true;
}

/* One step of the queue's oldest command buffer; false when there is none or an event blocks it. */
static bool step(struct emu_queue *queue) {
    struct emu_command_buffer *commands = queue->head;
    if (!commands) return false;
    if (commands->status == MTLCommandBufferStatusCommitted && !start(commands)) return true;
    if (commands->at == commands->count) {
        complete(commands);
        return true;
    }
    struct emu_command *command = &commands->commands[commands->at];
    NSInteger code = 0;
    if (released_in_use(commands)) {
        code = MTLCommandBufferErrorInvalidResource;
    } else if (command->kind == EMU_WAIT) {
        if (command->event->value < command->value) return false;
        commands->at++;
    } else if (command->kind == EMU_SIGNAL) {
        if (command->value <= command->event->value) {
            emu_find(METAL_EMU_EVENT_ORDER, "the GPU signals %" PRIu64 " after %" PRIu64,
                     command->value, command->event->value);
        }
        command->event->value = command->value;
        commands->at++;
    } else {
        code = run_encoder(commands);
    }
    if (code != 0) emu_gpu_fail(commands, code, "execution failed");
    return true;
}

static bool step_any(void) {
    for (struct emu_queue *queue = queues; queue; queue = queue->next) {
        if (step(queue)) return true;
    }
    return false;
}

void emu_gpu_poll(void) {
    step_any();
}

void emu_gpu_submit(struct emu_command_buffer *commands) {
    emu_lock();
    struct emu_queue *queue = commands->queue;
    commands->status = MTLCommandBufferStatusCommitted;
    objc_retain(&commands->object);
    inject_take(commands);
    if (released_in_use(commands)) {
        emu_find(METAL_EMU_BUFFER_RELEASED, "before commit of an unretained command buffer");
    }
    if (queue->tail) {
        queue->tail->next = commands;
    } else {
        queue->head = commands;
    }
    queue->tail = commands;
    emu_buffers_in_flight(commands, true);
    if (emu_options.schedule == METAL_EMU_EARLY) {
        while (step_any()) {
        }
    }
    emu_unlock();
}

/* ---- Waiting for another thread of the host ---- */

static bool only_thread(void) {
    DIR *tasks = opendir("/proc/self/task");
    if (!tasks) return false;
    int count = 0;
    for (struct dirent *entry; (entry = readdir(tasks));) count += entry->d_name[0] != '.';
    closedir(tasks);
    return count == 1;
}

/* Works until `done`, the lock held; false when nothing more can happen. Where the process has
 * one thread only, that is known at once; otherwise others get `hang_ms` to commit or signal. */
bool emu_gpu_run_until(bool (*done)(const void *context), const void *context, uint32_t hang_ms) {
    double deadline = now() + 1e-3 * hang_ms;
    while (!done(context)) {
        if (step_any()) continue;
        if (only_thread() || now() >= deadline) return false;
        emu_unlock();
        usleep(1000);
        emu_lock();
    }
    return true;
}
