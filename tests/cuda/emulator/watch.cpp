/* The library that g++ -fsanitize=thread calls at every access, for one processor thread that runs
 * a card's threads in turn. Two accesses to the same two bytes, one of them a write, are in order
 * when
 *   - they are of different launches, and of these the later one began when the earlier one had
 *     ended, or its thread has waited for that (griddepcontrol.wait);
 *   - they are of one block, with a barrier of the block between them;
 *   - they are of one warp, with an exchange of its lanes between them; or of one thread.
 * Anything else is reported, and the program fails at its end. Single bytes are not looked at, nor
 * is what atomic operations touch. A launch that waits for the one before it has by that waited for
 * all: none ends before it has waited itself (emulator.cpp). */
#include "watch.h"

#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <set>
#include <string>
#include <unistd.h>
#include <unordered_map>

extern "C" char __bss_start, _end; /* variables that blocks share lie between */

namespace {

enum { PAGE = 4096, CELL = 2, MOST_REPORTS = 24 };

struct Access {
    uint32_t launch, block, barriers, meetings;
    uint16_t thread;
    bool others; /* of a read: other warps have read since the newest barrier too */
};
struct Cell {
    Access write, read;
};
struct Page {
    bool of_block; /* each block has its own, one after the other at one address */
    Cell cell[PAGE / CELL];
};

std::unordered_map<uintptr_t, Page *> pages; /* by number; NULL: nothing was written there */
std::set<uintptr_t> shared;                  /* the dynamic shared memory's */
uintptr_t newest = 0;
Page *newest_page;
std::set<std::string> reports;

using emulator::moment;

void report(const char *what, const void *pc, const Access &other) {
    if (reports.size() >= MOST_REPORTS) return;
    Dl_info where = {};
    dladdr(pc, &where);
    char text[256];
    snprintf(text, sizeof text, "%s: %s (at %#zx)", emulator::running, what,
             (size_t)((const char *)pc - (const char *)where.dli_fbase));
    if (!reports.insert(text).second) return;
    fprintf(
        stderr,
        "watched card: %s: block %u thread %u, launch %u; other: block %u thread %u, launch %u\n",
        text, moment.block, moment.thread, moment.launch, other.block, other.thread, other.launch);
}

/* NULL: not watched, or nothing there was ever written (weights). */
Page *page_of(uintptr_t at, bool write) {
    uintptr_t number = at / PAGE;
    if (number == newest) return newest_page;
    auto found = pages.find(number);
    bool variable = at >= (uintptr_t)&__bss_start && at < (uintptr_t)&_end;
    if (found == pages.end()) {
        if (!variable) return nullptr;
        found = pages.emplace(number, nullptr).first;
    }
    if (!found->second) {
        if (!write) return nullptr;
        found->second = (Page *)calloc(1, sizeof(Page));
        found->second->of_block = variable || shared.count(number);
    }
    newest = number;
    return newest_page = found->second;
}

/* Whether an access of this launch is before the present one. */
bool ordered(const Access &a, bool of_block) {
    if (a.block != moment.block) return of_block;
    if (a.thread == moment.thread || a.barriers != moment.barriers) return true;
    return a.thread / 32 == moment.thread / 32 && a.meetings != moment.meetings && !a.others;
}

void remember(Access &a, bool read) {
    bool others = read && a.launch == moment.launch && a.barriers == moment.barriers &&
                  a.block == moment.block && (a.others || a.thread / 32 != moment.thread / 32);
    if (read && a.launch == moment.launch && a.block != moment.block) others = true;
    a = {moment.launch, moment.block, moment.barriers, moment.meetings, moment.thread, others};
}

void touch(uintptr_t at, size_t bytes, bool write, const void *pc) {
    if (bytes < CELL || !moment.launch) return;
    for (uintptr_t p = at / CELL * CELL; p < at + bytes; p += CELL) {
        Page *page = page_of(p, write);
        if (!page) {
            p += PAGE - p % PAGE - CELL; /* to the next page */
            continue;
        }
        Cell &c = page->cell[p % PAGE / CELL];
        bool now = moment.early && !moment.waited && !page->of_block;
        if (now && write) {
            report("writes before it has waited", pc, c.write);
        } else if (now && c.write.launch >= moment.plain && c.write.launch < moment.launch) {
            report("reads before it has waited what the launch before wrote", pc, c.write);
        }
        if (c.write.launch == moment.launch && !ordered(c.write, page->of_block)) {
            report(write ? "writes what another wrote" : "reads what another wrote", pc, c.write);
        }
        if (write && c.read.launch == moment.launch && !ordered(c.read, page->of_block)) {
            report("writes what another read", pc, c.read);
        }
        remember(write ? c.write : c.read, !write);
        if (write) c.read = {}; /* what comes is ordered against this write */
    }
}

struct Watch {
    Watch() {
        emulator::watch_memory = [](const void *at, size_t bytes, bool of_block) {
            for (uintptr_t p = (uintptr_t)at / PAGE; p <= ((uintptr_t)at + bytes - 1) / PAGE; p++) {
                if (of_block) shared.insert(p);
                Page *&page = pages[p];
                free(page);
                page = nullptr;
            }
            newest = 0;
        };
        emulator::watch_access = [](const void *at, size_t bytes, bool write, const void *pc) {
            touch((uintptr_t)at, bytes, write, pc);
        };
    }
    ~Watch() {
        fflush(nullptr);
        printf("watched card: %zu accesses that nothing orders\n", reports.size());
        fflush(nullptr);
        if (!reports.empty()) _exit(1);
    }
} watch;

} // namespace

size_t emulator::watch_reports() {
    size_t n = reports.size();
    reports.clear();
    return n;
}

#define HOOK(name, bytes, write)                                                                   \
    void __tsan_##name(void *at) {                                                                 \
        touch((uintptr_t)at, bytes, write, __builtin_return_address(0));                           \
    }
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}
void __tsan_read1(void *) {}
void __tsan_write1(void *) {}
HOOK(read2, 2, false)
HOOK(read4, 4, false)
HOOK(read8, 8, false)
HOOK(read16, 16, false)
HOOK(write2, 2, true)
HOOK(write4, 4, true)
HOOK(write8, 8, true)
HOOK(write16, 16, true)
HOOK(unaligned_read2, 2, false)
HOOK(unaligned_read4, 4, false)
HOOK(unaligned_read8, 8, false)
HOOK(unaligned_read16, 16, false)
HOOK(unaligned_write2, 2, true)
HOOK(unaligned_write4, 4, true)
HOOK(unaligned_write8, 8, true)
HOOK(unaligned_write16, 16, true)
void __tsan_read_range(void *at, size_t bytes) {
    touch((uintptr_t)at, bytes, false, __builtin_return_address(0));
}
void __tsan_write_range(void *at, size_t bytes) {
    touch((uintptr_t)at, bytes, true, __builtin_return_address(0));
}
}
