/* What order barriers impose, and what they fail to order. Two dispatches of a concurrent encoder
 * that touch a common byte, one of them writing, need a barrier between them that covers the buffer
 * through which the earlier one touched it. The bytes are those the executor saw. */
#include "internal.h"

#include <inttypes.h>
#include <stdlib.h>

/* A dispatch's use of one buffer, not yet covered by a barrier. */
struct use {
    const struct emu_dispatch *dispatch;
    const msl_usage *usage;
    const struct emu_buffer *buffer;
};

struct uses {
    struct use *at;
    size_t count, capacity;
};

static void add(struct uses *uses, struct use use) {
    if (uses->count == uses->capacity) {
        uses->capacity = uses->capacity ? 2 * uses->capacity : 64;
        uses->at = realloc(uses->at, uses->capacity * sizeof *uses->at);
        if (!uses->at) abort();
    }
    uses->at[uses->count++] = use;
}

static void forget(struct uses *uses, const struct emu_command *barrier) {
    size_t kept = 0;
    for (size_t i = 0; i < uses->count; i++) {
        bool covered = barrier->kind == EMU_BARRIER_ALL;
        for (size_t j = 0; j < barrier->count && !covered; j++) {
            covered = barrier->list[j] == uses->at[i].buffer;
        }
        if (!covered) uses->at[kept++] = uses->at[i];
    }
    uses->count = kept;
}

/* The first bytes in both lists, as addresses; ranges ascend and are disjoint in each. */
static bool common(const msl_range *a, size_t an, uintptr_t a_base, const msl_range *b, size_t bn,
                   uintptr_t b_base, uintptr_t *begin, uintptr_t *end) {
    size_t i = 0, j = 0;
    while (i < an && j < bn) {
        uintptr_t a0 = a_base + a[i].begin, a1 = a_base + a[i].end;
        uintptr_t b0 = b_base + b[j].begin, b1 = b_base + b[j].end;
        *begin = a0 > b0 ? a0 : b0;
        *end = a1 < b1 ? a1 : b1;
        if (*begin < *end) return true;
        if (a1 < b1) {
            i++;
        } else {
            j++;
        }
    }
    return false;
}

static void compare(const struct use *earlier, const struct use *later) {
    uintptr_t x = (uintptr_t)earlier->buffer->base, y = (uintptr_t)later->buffer->base;
    const msl_usage *a = earlier->usage, *b = later->usage;
    uintptr_t begin, end;
    const char *what = NULL;
    if (common(a->written, a->written_count, x, b->read, b->read_count, y, &begin, &end)) {
        what = "writes what the later reads";
    } else if (common(a->written, a->written_count, x, b->written, b->written_count, y, &begin,
                      &end)) {
        what = "writes what the later writes";
    } else if (common(a->read, a->read_count, x, b->written, b->written_count, y, &begin, &end)) {
        what = "reads what the later writes";
    }
    if (!what) return;
    emu_find(METAL_EMU_HAZARD, "%s, then %s: the earlier %s, bytes %zu to %zu of %s",
             earlier->dispatch->pipeline->kernel->name, later->dispatch->pipeline->kernel->name,
             what, (size_t)(begin - x), (size_t)(end - x),
             earlier->buffer->label ? earlier->buffer->label : "a buffer without label");
}

static void check_dispatch(struct uses *uses, const struct emu_dispatch *dispatch) {
    size_t before = uses->count;
    for (size_t i = 0; dispatch->report && i < dispatch->report->usage_count; i++) {
        const msl_usage *usage = &dispatch->report->usage[i];
        const struct emu_buffer *buffer = dispatch->bindings[usage->index].buffer;
        if (!buffer) continue;
        struct use use = {dispatch, usage, buffer};
        for (size_t j = 0; j < before; j++) compare(&uses->at[j], &use);
        add(uses, use);
    }
}

/* The GPU reads the grid before the dispatch: a write to it that no barrier covers is a hazard. */
static void check_indirect(const struct uses *uses, const struct emu_dispatch *dispatch) {
    if (!dispatch->indirect) return;
    msl_range grid = {dispatch->indirect_offset, dispatch->indirect_offset + 12};
    msl_usage usage = {.read = &grid, .read_count = 1};
    struct use use = {dispatch, &usage, dispatch->indirect};
    for (size_t j = 0; j < uses->count; j++) compare(&uses->at[j], &use);
}

void emu_hazards_check(const struct emu_command_buffer *commands, size_t first, size_t last) {
    if (!commands->commands[first].concurrent) return;
    struct uses uses = {0};
    for (size_t i = first; i < last; i++) {
        const struct emu_command *command = &commands->commands[i];
        if (command->kind == EMU_DISPATCH) {
            check_indirect(&uses, command->dispatch);
            check_dispatch(&uses, command->dispatch);
        } else if (command->kind == EMU_BARRIER_ALL || command->kind == EMU_BARRIER_LIST) {
            forget(&uses, command);
        }
    }
    free(uses.at);
}

/* ---- Stages ---- */

static void raise_to(int32_t *level, int32_t to) {
    if (*level < to) *level = to;
}

static void reset_levels(struct emu_command_buffer *commands) {
    for (size_t i = 0; i < commands->held_count; i++) {
        if (commands->held[i]->isa != &emu_buffer_class) continue;
        struct emu_buffer *buffer = (struct emu_buffer *)commands->held[i];
        buffer->level_seen = 0;
        buffer->level_floor = 0;
    }
}

/* The stage of a dispatch is the length of the longest chain of ordered dispatches that ends with
 * it. `floor` is imposed by encoders and full barriers, a buffer's own by barriers that list it. */
static int32_t stage_of(const struct emu_dispatch *dispatch, int32_t floor) {
    int32_t stage = floor;
    for (size_t i = 0; i < MSL_MAX_BUFFERS; i++) {
        const struct emu_buffer *buffer = dispatch->bindings[i].buffer;
        if (buffer) raise_to(&stage, buffer->level_floor);
    }
    if (dispatch->indirect) raise_to(&stage, dispatch->indirect->level_floor);
    return stage + 1;
}

static void mark_seen(const struct emu_dispatch *dispatch) {
    for (size_t i = 0; i < MSL_MAX_BUFFERS; i++) {
        struct emu_buffer *buffer = dispatch->bindings[i].buffer;
        if (buffer) raise_to(&buffer->level_seen, dispatch->stage);
    }
    if (dispatch->indirect) raise_to(&dispatch->indirect->level_seen, dispatch->stage);
}

void emu_stages_assign(struct emu_command_buffer *commands) {
    reset_levels(commands);
    int32_t floor = 0, highest = 0;
    bool concurrent = false;
    for (size_t i = 0; i < commands->count; i++) {
        struct emu_command *command = &commands->commands[i];
        switch (command->kind) {
        case EMU_BEGIN:
            concurrent = command->concurrent;
            floor = highest;
            break;
        case EMU_DISPATCH:
            command->dispatch->stage = stage_of(command->dispatch, concurrent ? floor : highest);
            raise_to(&highest, command->dispatch->stage);
            mark_seen(command->dispatch);
            break;
        case EMU_BARRIER_ALL:
            floor = highest;
            break;
        case EMU_BARRIER_LIST:
            for (size_t j = 0; j < command->count; j++) {
                command->list[j]->level_floor = command->list[j]->level_seen;
            }
            break;
        default:
            break;
        }
    }
}
