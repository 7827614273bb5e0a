// Shadow memory: for each byte that a kernel may write, who wrote and who read it last. Bytes that
// were only accessed together, two or four aligned ones, share one cell.
//
// Two accesses are ordered when the same thread makes both, or a barrier for that kind of memory
// (mem_device or mem_threadgroup) lies between: of the threadgroup when they share it, of the
// simdgroup when they share that. Accesses of two threadgroups are never ordered in a dispatch.
// Two readers are remembered for each byte, as far apart as possible: enough for every write that
// conflicts with any reader to conflict with one of the two.
#include "internal.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>

namespace msl {
namespace {

enum Space { space_device, space_threadgroup };

struct Stamp {            // when and by whom
    uint32_t epoch = 0;   // threadgroup barriers passed, counted over the dispatch; 0: never
    uint32_t thread : 10; // in its threadgroup
    uint32_t atomic : 1;
    uint32_t simd_epoch : 21;
};

struct Cell {
    Stamp writer, readers[2];
};

struct Window { // of a binding in its region
    unsigned index;
    uintptr_t base, begin, end;
    bool writable;
};

struct Bits { // one a byte; only touched words are ever looked at
    uint64_t *words = nullptr;
    uint64_t low = ~(uint64_t)0, high = 0; // touched words: low..high
};

struct Region { // memory whose accesses are tracked together: allocations that overlap are one
    uintptr_t begin, end;
    Space space;
    std::vector<Window> windows;
    Cell *cells = nullptr;             // null: read only, so no race is possible
    unsigned shift = 0;                // a cell is 1 << shift bytes
    size_t low = ~(size_t)0, high = 0; // touched cells: low..high - 1
    Bits read, written;                // device memory only
    uint64_t bytes_read = 0, bytes_written = 0;
    size_t last_window = 0; // that permitted an access

    size_t size() const { return end - begin; }
};

struct Variable {
    uintptr_t begin, end;
};

std::vector<Region> regions;
std::vector<Variable> variables; // threadgroup variables declared so far in this dispatch
std::vector<std::pair<uintptr_t, uintptr_t>> missing_constants;
std::vector<uint32_t> epoch_groups; // threadgroup of each epoch
uint32_t epochs[2];                 // current one of each space
uint32_t group_start;               // first epoch of the running threadgroup
std::vector<uint32_t> simd_epochs[2];
size_t last_region;

bool ordered(const Stamp &before, const Stamp &now, Space space) {
    if (before.epoch == 0) return true;
    if (before.epoch < group_start) return space == space_threadgroup; // of another threadgroup
    if (before.thread == now.thread || before.epoch < now.epoch) return true;
    return before.thread / MSL_SIMD_WIDTH == now.thread / MSL_SIMD_WIDTH &&
           before.simd_epoch < now.simd_epoch;
}

// 0: the same thread, 1: same simdgroup, 2: same threadgroup, 3: neither.
int distance(const Stamp &a, const Stamp &b) {
    if ((a.epoch < group_start) != (b.epoch < group_start)) return 3;
    if (a.epoch < group_start) return epoch_groups[a.epoch] == epoch_groups[b.epoch] ? 2 : 3;
    if (a.thread == b.thread) return 0;
    return a.thread / MSL_SIMD_WIDTH == b.thread / MSL_SIMD_WIDTH ? 1 : 2;
}

void remember_reader(Cell &cell, const Stamp &now, Space space) {
    for (Stamp &reader : cell.readers)
        if (reader.epoch != 0 && distance(reader, now) == 0) {
            reader = now;
            return;
        }
    for (Stamp &reader : cell.readers)
        if (ordered(reader, now, space) &&
            (reader.epoch == 0 || reader.epoch >= group_start || space == space_threadgroup)) {
            reader = now; // whoever conflicts with the older one conflicts with this one
            return;
        }
    if (distance(cell.readers[0], now) > distance(cell.readers[0], cell.readers[1]))
        cell.readers[1] = now;
}

void report_race(const Stamp &other, Place place, const char *what, const void *site) {
    place.other = other.thread;
    place.other_group = epoch_groups[other.epoch];
    add_fault(MSL_FAULT_RACE, site, place, what);
}

void check_read(Cell &cell, const Stamp &now, Space space, Place place, const void *site) {
    if (space == space_threadgroup && cell.writer.epoch < group_start)
        add_fault(MSL_FAULT_UNINITIALISED, site, place, "read before any write");
    if (!ordered(cell.writer, now, space) && !(cell.writer.atomic && now.atomic))
        report_race(cell.writer, place, "read of another thread's write", site);
    remember_reader(cell, now, space);
}

void check_write(Cell &cell, const Stamp &now, Space space, Place place, const void *site) {
    if (!ordered(cell.writer, now, space) && !(cell.writer.atomic && now.atomic)) {
        report_race(cell.writer, place, "write over another thread's write", site);
    } else {
        for (const Stamp &reader : cell.readers)
            if (!ordered(reader, now, space) && !(reader.atomic && now.atomic)) {
                report_race(reader, place, "write of what another thread reads", site);
                break;
            }
    }
    cell.writer = now;
}

template <class T> T *map_zeroed(size_t count) {
    void *memory = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) abort();
    return (T *)memory;
}

void mark(Bits &bits, uint64_t at, size_t count) {
    uint64_t first = at / 64, last = (at + count - 1) / 64;
    bits.low = std::min(bits.low, first);
    bits.high = std::max(bits.high, last);
    uint64_t from_first = ~(uint64_t)0 << (at % 64);
    uint64_t to_last = ~(uint64_t)0 >> (63 - (at + count - 1) % 64);
    if (first == last) {
        bits.words[first] |= from_first & to_last;
        return;
    }
    bits.words[first] |= from_first;
    for (uint64_t i = first + 1; i < last; i++) bits.words[i] = ~(uint64_t)0;
    bits.words[last] |= to_last;
}

size_t cells_of(const Region &region, unsigned shift) {
    return (region.size() >> shift) + 1;
}

// Smaller cells, because of an access that begins or ends within one.
void refine(Region &region, uintptr_t offset_and_size) {
    unsigned shift = region.shift;
    while ((offset_and_size & (((uintptr_t)1 << shift) - 1)) != 0) shift--;
    unsigned parts = 1u << (region.shift - shift);
    Cell *cells = map_zeroed<Cell>(cells_of(region, shift));
    for (size_t i = region.low; i < region.high; i++)
        for (unsigned k = 0; k < parts; k++) cells[i * parts + k] = region.cells[i];
    munmap(region.cells, cells_of(region, region.shift) * sizeof(Cell));
    region.cells = cells;
    region.shift = shift;
    if (region.high > 0) region.low *= parts;
    region.high *= parts;
}

Region *find_region(uintptr_t address) {
    if (last_region < regions.size() && address >= regions[last_region].begin &&
        address < regions[last_region].end)
        return &regions[last_region];
    for (size_t i = 0; i < regions.size(); i++)
        if (address >= regions[i].begin && address < regions[i].end) {
            last_region = i;
            return &regions[i];
        }
    return nullptr;
}

[[noreturn]] void out_of_bounds(Place place, const char *what, const void *site) {
    add_fault(MSL_FAULT_OUT_OF_BOUNDS, site, place, what);
    stop_kernel();
}

// The binding that permits the access; a pointer's origin is unknown, so any that covers it may.
const Window &find_window(Region &region, uintptr_t address, size_t size, bool write,
                          const void *site) {
    const Window &last = region.windows[region.last_window];
    if (address >= last.begin && address + size <= last.end && (!write || last.writable))
        return last;
    const Window *covering = nullptr;
    for (const Window &w : region.windows) {
        if (address < w.begin || address + size > w.end) continue;
        if (!write || w.writable) {
            region.last_window = (size_t)(&w - region.windows.data());
            return w;
        }
        covering = &w;
    }
    const Window &nearest = covering != nullptr ? *covering : region.windows.front();
    Place place = {(int)nearest.index, address - nearest.base};
    if (covering == nullptr)
        out_of_bounds(place, "beyond the end, or before the offset, of the buffer", site);
    add_fault(MSL_FAULT_READ_ONLY, site, place, "through a const binding");
    stop_kernel();
}

uint64_t variable_offset(uintptr_t address, size_t size, const void *site) {
    for (const Variable &v : variables)
        if (address >= v.begin && address + size <= v.end) return address - v.begin;
    out_of_bounds({-1, 0}, "outside every threadgroup variable", site);
}

Stamp stamp_now(Space space, bool atomic) {
    const msl_thread_context &c = machine.current->context;
    Stamp now;
    now.epoch = epochs[space];
    now.thread = c.index_in_group;
    now.atomic = atomic;
    now.simd_epoch = simd_epochs[space][c.simdgroup];
    return now;
}

void access_region(Region &region, uintptr_t address, size_t size, bool write, bool atomic,
                   const void *site) {
    Place place = {-1, address - region.begin};
    if (region.space == space_device) {
        const Window &window = find_window(region, address, size, write, site);
        place = {(int)window.index, address - window.base};
        (write ? region.bytes_written : region.bytes_read) += size;
        mark(write ? region.written : region.read, address - region.begin, size);
    } else if (region.windows.empty()) {
        place.offset = variable_offset(address, size, site);
    } else if (address + size > region.end) {
        out_of_bounds(place, "beyond the end of the threadgroup argument", site);
    }
    if (region.cells == nullptr) return;
    uintptr_t offset = address - region.begin;
    if (((offset | size) & (((uintptr_t)1 << region.shift) - 1)) != 0)
        refine(region, offset | size);
    Stamp now = stamp_now(region.space, atomic);
    size_t first = offset >> region.shift, last = first + (size >> region.shift);
    region.low = std::min(region.low, first);
    region.high = std::max(region.high, last);
    for (size_t i = first; i < last; i++, place.offset += (uint64_t)1 << region.shift) {
        Cell &cell = region.cells[i];
        if (write)
            check_write(cell, now, region.space, place, site);
        else
            check_read(cell, now, region.space, place, site);
    }
}

// The buffer that an index too high or too low most likely meant; none when all are far away.
Place nearest_buffer(uintptr_t address) {
    Place place = {-2, address};
    uintptr_t best = 4096;
    for (const Region &region : regions) {
        uintptr_t gap = address >= region.end ? address - region.end : region.begin - address;
        if (region.windows.empty() || gap >= best) continue;
        best = gap;
        int index = region.space == space_device ? (int)region.windows.front().index : -1;
        place = {index, address - region.begin};
    }
    return place;
}

void access_elsewhere(uintptr_t address, size_t size, bool write, const void *site) {
    uintptr_t begin = (uintptr_t)machine.image->begin, end = (uintptr_t)machine.image->end;
    uintptr_t rounds = (uintptr_t)machine.simdgroups.data();
    uintptr_t rounds_end = rounds + machine.simdgroups.size() * sizeof(Simdgroup);
    if (address >= rounds && address < rounds_end) return; // the shim's own
    if (address >= begin && address + size <= end && !write) {
        for (auto [first, last] : missing_constants)
            if (address >= first && address < last)
                add_fault(MSL_FAULT_CONSTANT_MISSING, site, {-2, 0}, "read");
        return;
    }
    out_of_bounds(nearest_buffer(address),
                  write ? "write outside every buffer" : "read outside every buffer", site);
}

void add_region(uintptr_t begin, size_t size, Space space, std::vector<Window> windows) {
    Region &region = regions.emplace_back();
    region.begin = begin;
    region.end = begin + size;
    region.space = space;
    region.windows = std::move(windows);
}

void add_buffers(const msl_dispatch &dispatch) {
    std::vector<std::pair<uintptr_t, Window>> starts;
    for (const msl_binding &b : machine.kernel->bindings) {
        if (b.kind == MSL_BIND_THREADGROUP) continue;
        const msl_buffer &buffer = dispatch.buffers[b.index];
        uintptr_t base = (uintptr_t)buffer.base;
        Window window = {b.index, base, base + buffer.offset, base + buffer.length,
                         b.access != MSL_READ};
        if (b.reference) window.end = window.begin + b.element_size;
        starts.push_back({base, window});
    }
    std::sort(starts.begin(), starts.end(), [](const auto &a, const auto &b) {
        return std::pair(a.first, a.second.index) < std::pair(b.first, b.second.index);
    });
    for (auto &[base, window] : starts) {
        const msl_buffer &buffer = dispatch.buffers[window.index];
        uintptr_t end = base + buffer.length;
        if (!regions.empty() && base < regions.back().end) {
            regions.back().end = std::max(regions.back().end, end);
            regions.back().windows.push_back(window);
        } else {
            add_region(base, buffer.length, space_device, {window});
        }
    }
}

void add_shadow(Region &region) {
    bool writable = region.space == space_threadgroup;
    for (const Window &w : region.windows) writable = writable || w.writable;
    if (region.space == space_device) {
        region.read.words = map_zeroed<uint64_t>(region.size() / 64 + 1);
        if (writable) region.written.words = map_zeroed<uint64_t>(region.size() / 64 + 1);
    }
    if (!writable) return;
    region.shift = region.begin % 4 == 0 ? 2 : region.begin % 2 == 0 ? 1 : 0;
    region.cells = map_zeroed<Cell>(cells_of(region, region.shift));
}

void drop_shadow(Region &region) {
    if (region.cells != nullptr)
        munmap(region.cells, cells_of(region, region.shift) * sizeof(Cell));
    for (Bits *bits : {&region.read, &region.written})
        if (bits->words != nullptr) munmap(bits->words, (region.size() / 64 + 1) * 8);
    region.cells = nullptr;
}

// The bits set in [first, last) as ranges that start at `first`.
msl_range *ranges_of(const Bits &bits, uint64_t first, uint64_t last, size_t *count,
                     uint64_t *total) {
    std::vector<msl_range> found;
    uint64_t at = std::max(first, bits.low * 64), end = std::min(last, (bits.high + 1) * 64);
    while (bits.words != nullptr && at < end && bits.low <= bits.high) {
        uint64_t word = bits.words[at / 64] >> (at % 64), left = 64 - at % 64;
        uint64_t zeros = word == 0 ? left : std::min((uint64_t)__builtin_ctzll(word), left);
        at += zeros;
        if (zeros == left || at >= end) continue;
        word >>= zeros;
        left -= zeros;
        uint64_t ones = ~word == 0 ? left : std::min((uint64_t)__builtin_ctzll(~word), left);
        ones = std::min(ones, end - at);
        if (!found.empty() && found.back().end == at - first)
            found.back().end += ones;
        else
            found.push_back({at - first, at - first + ones});
        *total += ones;
        at += ones;
    }
    *count = found.size();
    msl_range *copy = (msl_range *)malloc((found.size() + 1) * sizeof *copy);
    if (copy == nullptr) abort();
    std::copy(found.begin(), found.end(), copy);
    return copy;
}

void add_usage(const Region &region, const Window &window, uint64_t length, msl_usage *usage) {
    uint64_t first = window.base - region.begin;
    usage->index = window.index;
    usage->bytes_read = region.bytes_read;
    usage->bytes_written = region.bytes_written;
    usage->read =
        ranges_of(region.read, first, first + length, &usage->read_count, &usage->unique_read);
    usage->written = ranges_of(region.written, first, first + length, &usage->written_count,
                               &usage->unique_written);
}

} // namespace

void checker_begin(const msl_dispatch &dispatch, char *const *tg_memory,
                   const std::vector<std::pair<unsigned, bool>> &constants_set) {
    regions.clear();
    missing_constants.clear();
    epoch_groups.assign(1, 0);
    epochs[0] = epochs[1] = 0;
    add_buffers(dispatch);
    for (const msl_binding &b : machine.kernel->bindings)
        if (b.kind == MSL_BIND_THREADGROUP) {
            uintptr_t base = (uintptr_t)tg_memory[b.index];
            size_t length = dispatch.tg_length[b.index];
            add_region(base, length, space_threadgroup,
                       {{b.index, base, base, base + length, true}});
        }
    const Image &image = *machine.image;
    if (image.tg_end > image.tg_begin)
        add_region((uintptr_t)image.tg_begin, image.tg_end - image.tg_begin, space_threadgroup, {});
    for (Region &region : regions) add_shadow(region);
    for (auto [i, set] : constants_set)
        if (!set) {
            uintptr_t address = (uintptr_t)image.constants[i].address;
            missing_constants.push_back({address, address + image.constants[i].size});
        }
}

namespace {
uint32_t new_epoch() {
    epoch_groups.push_back(machine.group_index);
    return (uint32_t)epoch_groups.size() - 1;
}
} // namespace

void checker_begin_group() {
    group_start = new_epoch();
    epochs[0] = epochs[1] = group_start;
    for (auto &list : simd_epochs) list.assign(machine.simdgroups.size(), 0);
    for (Region &region : regions) // garbage of no earlier threadgroup: a value that shows
        if (region.space == space_threadgroup)
            memset((void *)region.begin, 0xff, region.end - region.begin);
}

void checker_group_barrier(int flags) {
    for (int space = 0; space < 2; space++)
        if ((flags >> space & 1) != 0) epochs[space] = new_epoch();
}

void checker_simd_barrier(unsigned simdgroup, int flags) {
    for (int space = 0; space < 2; space++)
        if ((flags >> space & 1) != 0) simd_epochs[space][simdgroup]++;
}

void checker_access(uintptr_t address, size_t size, bool write, bool atomic, const void *site) {
    const Fiber *me = machine.current;
    if (me == nullptr) return;
    uintptr_t stacks = (uintptr_t)machine.stacks, stack = (uintptr_t)me->stack;
    if (address >= stacks && address < stacks + stack_size * MSL_MAX_THREADS) {
        if (address >= stack && address + size <= stack + stack_size) return;
        out_of_bounds({-2, address}, "memory of another thread", site);
    }
    Region *region = find_region(address);
    if (region == nullptr)
        access_elsewhere(address, size, write, site);
    else
        access_region(*region, address, size, write, atomic, site);
}

void checker_end(msl_report *report) {
    size_t count = 0;
    for (const Region &region : regions) count += region.windows.size();
    report->usage = (msl_usage *)calloc(count + 1, sizeof *report->usage);
    if (report->usage == nullptr) abort();
    for (Region &region : regions) {
        if (region.space == space_device)
            for (const Window &w : region.windows)
                add_usage(region, w, std::min(region.end, w.end) - w.base,
                          &report->usage[report->usage_count++]);
        drop_shadow(region);
    }
}

void checker_forget_variables() {
    variables.clear();
}

unsigned checker_static_bytes() {
    unsigned total = 0;
    for (const Variable &v : variables) total += (unsigned)(v.end - v.begin);
    return total;
}

} // namespace msl

extern "C" void msl_threadgroup_variable(const void *base, unsigned size, const char *) {
    uintptr_t begin = (uintptr_t)base;
    for (const msl::Variable &v : msl::variables)
        if (v.begin == begin) return;
    msl::variables.push_back({begin, begin + size});
}
