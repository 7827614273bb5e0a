/* The recorded graph of a command buffer, as JSON. */
#include "internal.h"

#include <stdlib.h>

static json_t *graphs; /* an array */

struct span {
    uintptr_t begin, end;
};

struct spans {
    struct span *at;
    size_t count, capacity;
};

static void add(struct spans *spans, uintptr_t base, const msl_range *ranges, size_t count) {
    if (spans->count + count > spans->capacity) {
        spans->capacity = 2 * (spans->count + count);
        spans->at = realloc(spans->at, spans->capacity * sizeof *spans->at);
        if (!spans->at) abort();
    }
    for (size_t i = 0; i < count; i++) {
        spans->at[spans->count++] = (struct span){base + ranges[i].begin, base + ranges[i].end};
    }
}

static int by_begin(const void *a, const void *b) {
    const struct span *x = a, *y = b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

/* Bytes in the union of the spans, which are sorted by it. */
static uint64_t union_bytes(struct spans *spans) {
    if (spans->count > 0) qsort(spans->at, spans->count, sizeof *spans->at, by_begin);
    uint64_t bytes = 0;
    uintptr_t reached = 0;
    for (size_t i = 0; i < spans->count; i++) {
        struct span s = spans->at[i];
        if (s.begin < reached) s.begin = reached;
        if (s.end <= s.begin) continue;
        bytes += s.end - s.begin;
        reached = s.end;
    }
    return bytes;
}

struct totals {
    struct spans read, written;
    uint64_t traffic_read, traffic_written;
    json_int_t dispatches, barriers, encoders, stages;
};

static json_t *triple(MTLSize size) {
    return json_pack("[III]", (json_int_t)size.width, (json_int_t)size.height,
                     (json_int_t)size.depth);
}

static json_t *node(const struct emu_dispatch *dispatch, struct totals *totals) {
    uint64_t read = 0, written = 0;
    for (size_t i = 0; dispatch->report && i < dispatch->report->usage_count; i++) {
        const msl_usage *usage = &dispatch->report->usage[i];
        const struct emu_buffer *buffer = dispatch->bindings[usage->index].buffer;
        if (!buffer) continue;
        read += usage->unique_read;
        written += usage->unique_written;
        add(&totals->read, (uintptr_t)buffer->base, usage->read, usage->read_count);
        add(&totals->written, (uintptr_t)buffer->base, usage->written, usage->written_count);
    }
    totals->traffic_read += read;
    totals->traffic_written += written;
    return json_pack("{s:s, s:i, s:o, s:o, s:I, s:I}", "kernel", dispatch->pipeline->kernel->name,
                     "stage", dispatch->stage, "groups", triple(dispatch->groups), "threads",
                     triple(dispatch->threads), "read", (json_int_t)read, "written",
                     (json_int_t)written);
}

void emu_graph_record(const struct emu_command_buffer *commands) {
    struct totals totals = {0};
    json_t *nodes = json_array();
    for (size_t i = 0; i < commands->count; i++) {
        const struct emu_command *command = &commands->commands[i];
        totals.encoders += command->kind == EMU_BEGIN;
        totals.barriers += command->kind == EMU_BARRIER_ALL || command->kind == EMU_BARRIER_LIST;
        if (command->kind != EMU_DISPATCH) continue;
        totals.dispatches++;
        if (command->dispatch->stage > totals.stages) totals.stages = command->dispatch->stage;
        json_array_append_new(nodes, node(command->dispatch, &totals));
    }
    json_t *graph = json_pack(
        "{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o}", "label",
        commands->label ? commands->label : "", "status", (json_int_t)commands->status, "encoders",
        totals.encoders, "dispatches", totals.dispatches, "stages", totals.stages, "barriers",
        totals.barriers, "unique_read", (json_int_t)union_bytes(&totals.read), "unique_written",
        (json_int_t)union_bytes(&totals.written), "traffic_read", (json_int_t)totals.traffic_read,
        "traffic_written", (json_int_t)totals.traffic_written, "nodes", nodes);
    free(totals.read.at);
    free(totals.written.at);
    if (!graphs) graphs = json_array();
    json_array_append_new(graphs, graph);
}

void emu_graphs_forget(void) {
    json_decref(graphs);
    graphs = NULL;
}

size_t metal_emu_graph_count(void) {
    return json_array_size(graphs);
}

char *metal_emu_graph_json(size_t index) {
    return json_dumps(json_array_get(graphs, index), JSON_INDENT(1));
}
