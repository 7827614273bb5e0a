// Pipelines, and a dispatch from its arguments to its report.
#include "machine.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>

msl::Image *msl_library_image(const msl_library *library);

struct msl_pipeline {
    msl::Image *image;
    const msl::Kernel *kernel = nullptr;
    std::vector<std::pair<bool, std::vector<char>>> values; // of each constant: given, bytes
};

namespace {

using msl::machine;
std::mutex running;
const msl_pipeline *current_pipeline;

// One block for all threadgroup arguments; gaps keep an overrun of one out of the next.
constexpr size_t tg_gap = 256;

size_t padded(size_t bytes) {
    return (bytes + 15) / 16 * 16 + tg_gap;
}

bool fault_before(msl_fault_kind kind, int buffer, const char *detail) {
    msl::add_fault(kind, nullptr, {buffer, 0}, detail);
    return false;
}

bool check_binding(const msl_binding &b, unsigned alignment, const msl_dispatch &d) {
    if (b.kind == MSL_BIND_THREADGROUP) {
        if (b.index >= MSL_MAX_TG_ARGS || d.tg_length[b.index] == 0)
            return fault_before(MSL_FAULT_TG_MEMORY, -2, "no length set for an argument");
        return true;
    }
    if (b.index >= MSL_MAX_BUFFERS)
        return fault_before(MSL_FAULT_UNBOUND, (int)b.index, "index beyond the last");
    const msl_buffer &buffer = d.buffers[b.index];
    if (buffer.base == nullptr) return fault_before(MSL_FAULT_UNBOUND, (int)b.index, b.name);
    if (buffer.offset >= buffer.length)
        return fault_before(MSL_FAULT_UNBOUND, (int)b.index, "offset at or beyond the end");
    if (b.reference && buffer.length - buffer.offset < b.element_size)
        return fault_before(MSL_FAULT_UNBOUND, (int)b.index, "shorter than the argument's type");
    if (((uintptr_t)buffer.base + buffer.offset) % alignment != 0)
        return fault_before(MSL_FAULT_MISALIGNED, (int)b.index, b.name);
    return true;
}

bool check_arguments(const msl::Kernel &kernel, const msl_dispatch &d, msl_report *report) {
    uint64_t threads = (uint64_t)d.group.x * d.group.y * d.group.z;
    if (threads == 0 || threads > kernel.info.max_threads || threads > MSL_MAX_THREADS)
        return fault_before(MSL_FAULT_THREADS, -2, "none, or more than the kernel's limit");
    bool good = true;
    for (size_t i = 0; i < kernel.bindings.size(); i++) {
        good = check_binding(kernel.bindings[i], kernel.alignments[i], d) && good;
        if (kernel.bindings[i].kind == MSL_BIND_THREADGROUP && good)
            report->tg_dynamic += (d.tg_length[kernel.bindings[i].index] + 15) / 16 * 16;
    }
    if (report->tg_dynamic > MSL_TG_MEMORY)
        good = fault_before(MSL_FAULT_TG_MEMORY, -2, "arguments larger than the limit");
    return good;
}

struct Shape { // of the grid
    msl_size grid, group, groups;
};

unsigned groups_along(unsigned grid, unsigned group) {
    return (unsigned)(((uint64_t)grid + group - 1) / group);
}

// Fills the contexts of the threadgroup at `at`, whose size at an edge may be smaller.
void place_threads(const Shape &s, msl_size at, void *const *buffers, void *const *tg_memory) {
    unsigned full[3] = {s.group.x, s.group.y, s.group.z};
    unsigned grid[3] = {s.grid.x, s.grid.y, s.grid.z};
    unsigned position[3] = {at.x, at.y, at.z};
    unsigned count[3] = {s.groups.x, s.groups.y, s.groups.z};
    unsigned size[3];
    for (int k = 0; k < 3; k++) size[k] = std::min(full[k], grid[k] - position[k] * full[k]);
    msl::prepare_group(size[0] * size[1] * size[2]);
    for (unsigned i = 0; i < machine.fibers.size(); i++) {
        msl_thread_context &c = machine.fibers[i].context;
        unsigned local[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
        for (int k = 0; k < 3; k++) {
            c.position_in_grid[k] = position[k] * full[k] + local[k];
            c.group_position[k] = position[k];
            c.position_in_group[k] = local[k];
            c.group_size[k] = size[k];
            c.full_group_size[k] = full[k];
            c.group_count[k] = count[k];
            c.grid_size[k] = grid[k];
        }
        c.buffers = buffers;
        c.threadgroup_memory = tg_memory;
        c.index_in_group = i;
        c.lane = i % MSL_SIMD_WIDTH;
        c.simdgroup = i / MSL_SIMD_WIDTH;
        c.simdgroup_count = (unsigned)machine.simdgroups.size();
    }
}

void run_groups(const Shape &shape, const msl_dispatch &d, char *const *tg_memory) {
    void *buffers[MSL_MAX_BUFFERS] = {};
    for (int i = 0; i < MSL_MAX_BUFFERS; i++)
        if (d.buffers[i].base != nullptr)
            buffers[i] = (char *)d.buffers[i].base + d.buffers[i].offset;
    std::vector<unsigned> order((size_t)shape.groups.x * shape.groups.y * shape.groups.z);
    for (unsigned i = 0; i < order.size(); i++) order[i] = i;
    if (machine.random != 0)
        for (size_t i = order.size(); i > 1; i--)
            std::swap(order[i - 1], order[msl::next_random() % i]);
    for (unsigned index : order) {
        if (machine.stopped) return;
        machine.group_index = index;
        unsigned x = shape.groups.x, y = shape.groups.y;
        place_threads(shape, {index % x, index / x % y, index / x / y}, buffers,
                      (void *const *)tg_memory);
        if (machine.image->checked) msl::checker_begin_group();
        machine.report->groups++;
        machine.report->threads += machine.fibers.size();
        msl::run_group();
    }
}

std::vector<std::pair<unsigned, bool>> set_constants(const msl_pipeline &pipeline) {
    std::vector<std::pair<unsigned, bool>> given;
    for (unsigned i = 0; i < pipeline.values.size(); i++) {
        const auto &[set, bytes] = pipeline.values[i];
        char *to = pipeline.image->constants[i].address;
        if (set)
            memcpy(to, bytes.data(), bytes.size());
        else
            memset(to, 0, pipeline.image->constants[i].size);
        given.push_back({i, set});
    }
    return given;
}

void execute(const msl_pipeline &pipeline, const msl_dispatch &d) {
    std::vector<size_t> offsets(MSL_MAX_TG_ARGS);
    size_t total = tg_gap;
    for (int i = 0; i < MSL_MAX_TG_ARGS; i++) {
        offsets[i] = total;
        if (d.tg_length[i] != 0) total += padded(d.tg_length[i]);
    }
    std::vector<unsigned char> memory(total + 16, 0xff);
    char *start = (char *)(((uintptr_t)memory.data() + 15) / 16 * 16);
    char *tg_memory[MSL_MAX_TG_ARGS];
    for (int i = 0; i < MSL_MAX_TG_ARGS; i++) tg_memory[i] = start + offsets[i];
    msl::checker_forget_variables();
    auto given = set_constants(pipeline);
    Shape shape = {d.grid,
                   d.group,
                   {groups_along(d.grid.x, d.group.x), groups_along(d.grid.y, d.group.y),
                    groups_along(d.grid.z, d.group.z)}};
    if (machine.image->checked) msl::checker_begin(d, tg_memory, given);
    run_groups(shape, d, tg_memory);
    if (machine.image->checked) msl::checker_end(machine.report);
    machine.report->tg_static = msl::checker_static_bytes();
    if (machine.report->tg_static + machine.report->tg_dynamic > MSL_TG_MEMORY)
        fault_before(MSL_FAULT_TG_MEMORY, -2, "variables and arguments larger than the limit");
}

} // namespace

extern "C" bool msl_constant_defined(const void *constant) {
    for (size_t i = 0; i < current_pipeline->values.size(); i++)
        if (current_pipeline->image->constants[i].address == constant)
            return current_pipeline->values[i].first;
    return false;
}

int msl_pipeline_create(msl_library *library, const char *kernel, const msl_constant_value *values,
                        size_t count, msl_pipeline **pipeline, char *msg) {
    msl::Image *image = msl_library_image(library);
    auto result = std::make_unique<msl_pipeline>();
    result->image = image;
    for (const msl::Kernel *k : image->kernels)
        if (k->name == kernel) result->kernel = k;
    if (result->kernel == nullptr) {
        snprintf(msg, MSL_MESSAGE_MAX, "library: no kernel %s", kernel);
        return -1;
    }
    for (const msl::Constant &c : image->constants) {
        result->values.push_back({false, {}});
        for (size_t i = 0; i < count; i++) {
            const msl_constant_value &v = values[i];
            if (v.name != nullptr ? c.name != v.name : c.index != v.index) continue;
            if (v.size != c.size) {
                snprintf(msg, MSL_MESSAGE_MAX, "function constant %s: found %u bytes, expected %u",
                         c.name.c_str(), v.size, c.size);
                return -1;
            }
            const char *bytes = (const char *)v.value;
            result->values.back() = {true, std::vector<char>(bytes, bytes + v.size)};
        }
    }
    *pipeline = result.release();
    return 0;
}

void msl_pipeline_free(msl_pipeline *pipeline) {
    delete pipeline;
}
const msl_kernel *msl_pipeline_kernel(const msl_pipeline *pipeline) {
    return &pipeline->kernel->info;
}

int msl_dispatch_run(msl_pipeline *pipeline, const msl_dispatch *dispatch, msl_report **report,
                     char *msg) {
    std::lock_guard<std::mutex> lock(running);
    *report = (msl_report *)calloc(1, sizeof **report);
    if (*report == nullptr) {
        snprintf(msg, MSL_MESSAGE_MAX, "no memory for a report");
        return -1;
    }
    machine.report = *report;
    machine.image = pipeline->image;
    machine.kernel = pipeline->kernel;
    machine.stopped = false;
    machine.seed = dispatch->seed;
    machine.random = dispatch->seed * 0x9e3779b97f4a7c15u;
    current_pipeline = pipeline;
    if (check_arguments(*pipeline->kernel, *dispatch, *report)) execute(*pipeline, *dispatch);
    msl::collect_faults(*report);
    return 0;
}

void msl_report_free(msl_report *report) {
    if (report == nullptr) return;
    for (size_t i = 0; i < report->usage_count; i++) {
        free((void *)report->usage[i].read);
        free((void *)report->usage[i].written);
    }
    free(report->usage);
    free(report->faults);
    free(report);
}
