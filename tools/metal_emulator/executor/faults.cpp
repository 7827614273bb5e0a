// Faults: where in the source, counted once for each kind, line and buffer.
#include "internal.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace msl {

namespace {

using Key = std::tuple<int, unsigned, int>;
std::map<Key, msl_fault> faults;
std::map<const void *, unsigned> lines;

// Line of kernel.metal at an address, through inlined frames; 0 when the code is the shim's.
unsigned ask_line(const void *address) {
    char command[1024], text[1024];
    const Image &image = *machine.image;
    uintptr_t offset = (uintptr_t)address - 1 - (uintptr_t)image.begin;
    snprintf(command, sizeof command, "addr2line -i -e '%s' 0x%zx", image.path.c_str(), offset);
    FILE *pipe = popen(command, "r");
    if (pipe == nullptr) return 0;
    unsigned line = 0;
    while (fgets(text, sizeof text, pipe) != nullptr) {
        const char *name = strstr(text, "kernel.metal:");
        if (name != nullptr && line == 0) line = (unsigned)atoi(strchr(name, ':') + 1);
    }
    pclose(pipe);
    return line;
}

unsigned line_of(const void *address) {
    const char *p = (const char *)address;
    if (p < machine.image->begin || p >= machine.image->end) return 0;
    auto found = lines.find(address);
    if (found == lines.end()) found = lines.emplace(address, ask_line(address)).first;
    return found->second;
}

unsigned find_line(const void *site) {
    unsigned line = line_of(site);
    const Fiber *fiber = machine.current;
    for (unsigned i = fiber == nullptr ? 0 : std::min(fiber->depth, 32u); line == 0 && i > 0; i--)
        line = line_of(fiber->calls[i - 1]);
    return line;
}

} // namespace

void add_fault(msl_fault_kind kind, const void *site, Place place, const char *detail) {
    unsigned line = site == nullptr ? 0 : find_line(site);
    auto [it, fresh] = faults.try_emplace(Key(kind, line, place.buffer));
    msl_fault &fault = it->second;
    fault.count++;
    if (!fresh) return;
    fault.kind = kind;
    fault.kernel = machine.kernel->info.name;
    fault.line = line;
    fault.buffer = place.buffer;
    fault.offset = place.offset;
    fault.other = place.other;
    fault.other_group = place.other_group;
    if (machine.current != nullptr) {
        const msl_thread_context &c = machine.current->context;
        memcpy(fault.group, c.group_position, sizeof fault.group);
        fault.thread = c.index_in_group;
    }
    char memory[64] = "";
    if (place.buffer >= 0)
        snprintf(memory, sizeof memory, " in buffer %d at byte %llu", place.buffer,
                 (unsigned long long)place.offset);
    else if (place.buffer == -1)
        snprintf(memory, sizeof memory, " in threadgroup memory at byte %llu",
                 (unsigned long long)place.offset);
    snprintf(fault.text, sizeof fault.text, "%s:%u: %s: %s%s, threadgroup (%u, %u, %u) thread %u",
             fault.kernel, line, msl_fault_name(kind), detail, memory, fault.group[0],
             fault.group[1], fault.group[2], fault.thread);
}

void collect_faults(msl_report *report) {
    report->faults = (msl_fault *)calloc(faults.size() + 1, sizeof *report->faults);
    if (report->faults == nullptr) abort();
    for (const auto &entry : faults) report->faults[report->fault_count++] = entry.second;
    faults.clear();
}

} // namespace msl

const char *msl_fault_name(msl_fault_kind kind) {
    switch (kind) {
    case MSL_FAULT_RACE:
        return "race";
    case MSL_FAULT_OUT_OF_BOUNDS:
        return "out of bounds";
    case MSL_FAULT_UNINITIALISED:
        return "uninitialised read";
    case MSL_FAULT_BARRIER:
        return "barrier divergence";
    case MSL_FAULT_SIMD_PARTIAL:
        return "partial simdgroup";
    case MSL_FAULT_READ_ONLY:
        return "write to read-only memory";
    case MSL_FAULT_UNBOUND:
        return "unbound buffer";
    case MSL_FAULT_MISALIGNED:
        return "misaligned buffer";
    case MSL_FAULT_CONSTANT_MISSING:
        return "function constant without a value";
    case MSL_FAULT_TG_MEMORY:
        return "threadgroup memory";
    case MSL_FAULT_THREADS:
        return "threads per threadgroup";
    }
    return "unknown";
}
