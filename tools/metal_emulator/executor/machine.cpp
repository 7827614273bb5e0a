// Threads of a threadgroup as fibers of one thread: switching, simdgroups, barriers. x86-64 only.
#include "machine.h"

#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <utility>

extern "C" void msl_switch(void **save, void *to);
// Saves what the System V convention asks a callee to keep, and continues on the other stack.
asm(R"(
.text
.globl msl_switch
.hidden msl_switch
.type msl_switch,@function
msl_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

namespace msl {

Machine machine;

Simdgroup &simdgroup_of(const Fiber &fiber) {
    return machine.simdgroups[fiber.context.simdgroup];
}

namespace {

// On to the next lane that can run, or to the scheduler. From lane to lane directly: the processor
// then foresees where the switch returns to.
void leave_fiber() {
    Fiber &me = *machine.current;
    const Simdgroup &simdgroup = simdgroup_of(me);
    Fiber *end = &machine.fibers[simdgroup.first] + simdgroup.count;
    for (Fiber *next = &me + 1; next < end && !machine.stopped; next++)
        if (next->state == State::ready) {
            machine.current = next;
            msl_switch(&me.stack_pointer, next->stack_pointer);
            return;
        }
    msl_switch(&me.stack_pointer, machine.scheduler);
}

void fiber_main() {
    machine.kernel->run(&machine.current->context);
    machine.current->state = State::done;
    leave_fiber();
    abort(); // a finished fiber is never resumed
}

void resume(Fiber &fiber) {
    machine.current = &fiber;
    msl_switch(&machine.scheduler, fiber.stack_pointer);
    machine.current = nullptr;
}

void wait(State state, const void *site, int flags) {
    Fiber &me = *machine.current;
    if (state != State::group_barrier) {
        Simdgroup &simdgroup = simdgroup_of(me);
        if (simdgroup.arrived++ == 0) {
            simdgroup.site = site;
            simdgroup.one_site = true;
        } else if (simdgroup.site != site) {
            simdgroup.one_site = false;
        }
    }
    me.state = state;
    me.site = site;
    me.flags = flags;
    leave_fiber();
}

void fault_at(Fiber &fiber, msl_fault_kind kind, const char *detail) {
    machine.current = &fiber;
    add_fault(kind, fiber.site, {-2, 0}, detail);
    machine.current = nullptr;
}

// The lanes that wait at one place: the first in the code, so that lanes that branched off meet
// the others again where the branch ends.
unsigned waiting_lanes(const Simdgroup &simdgroup, unsigned *leader) {
    if (simdgroup.arrived == simdgroup.count && simdgroup.one_site)
        return ~0u >> (MSL_SIMD_WIDTH - simdgroup.count);
    unsigned mask = 0;
    const void *site = nullptr;
    for (unsigned lane = 0; lane < simdgroup.count; lane++) {
        const Fiber &f = machine.fibers[simdgroup.first + lane];
        if (f.state != State::simd_operation && f.state != State::simd_barrier) continue;
        if (site == nullptr || f.site < site) {
            site = f.site;
            *leader = lane;
            mask = 0;
        }
        if (f.site == site) mask |= 1u << lane;
    }
    return mask;
}

// After some of the waiting lanes went on.
void recount(Simdgroup &simdgroup) {
    if (simdgroup.arrived == 0) return;
    bool first = true;
    simdgroup.one_site = true;
    for (unsigned lane = 0; lane < simdgroup.count; lane++) {
        const Fiber &f = machine.fibers[simdgroup.first + lane];
        if (f.state != State::simd_operation && f.state != State::simd_barrier) continue;
        if (first) simdgroup.site = f.site;
        if (f.site != simdgroup.site) simdgroup.one_site = false;
        first = false;
    }
}

void release(Simdgroup &simdgroup, unsigned number, unsigned mask, unsigned leader) {
    Fiber &first = machine.fibers[simdgroup.first + leader];
    bool barrier = first.state == State::simd_barrier;
    if ((unsigned)__builtin_popcount(mask) != simdgroup.count)
        fault_at(first, MSL_FAULT_SIMD_PARTIAL,
                 barrier ? "simdgroup_barrier reached by some lanes only"
                         : "simd operation reached by some lanes only");
    if (barrier) {
        machine.report->simd_barriers++;
        if (machine.image->checked) checker_simd_barrier(number, first.flags);
    } else {
        machine.report->simd_operations++;
    }
    unsigned char(*from)[64] = simdgroup.values[simdgroup.next];
    bool all = simdgroup.arrived == (unsigned)__builtin_popcount(mask);
    if (all) simdgroup.next ^= 1; // else the values of those that go on waiting stay where they are
    simdgroup.round.payload = simdgroup.values[simdgroup.next ^ 1];
    for (unsigned lane = 0; lane < simdgroup.count; lane++) {
        if ((mask >> lane & 1) == 0) continue;
        if (!all) memcpy(simdgroup.round.payload[lane], from[lane], sizeof from[lane]);
        machine.fibers[simdgroup.first + lane].state = State::ready;
    }
    simdgroup.arrived -= (unsigned)__builtin_popcount(mask);
    recount(simdgroup);
    simdgroup.round.mask = mask;
    simdgroup.round.done = 0;
}

// Runs one simdgroup until each of its lanes waits at a threadgroup barrier or has returned.
void run_simdgroup(unsigned number) {
    Simdgroup &simdgroup = machine.simdgroups[number];
    for (;;) {
        for (unsigned lane = 0; lane < simdgroup.count && !machine.stopped; lane++) {
            Fiber &fiber = machine.fibers[simdgroup.first + lane];
            if (fiber.state == State::ready) resume(fiber);
        }
        unsigned leader = 0;
        unsigned mask = machine.stopped ? 0 : waiting_lanes(simdgroup, &leader);
        if (mask == 0) return;
        release(simdgroup, number, mask, leader);
    }
}

void hold_meeting(unsigned first, unsigned count) {
    machine.offered.resize(count);
    for (unsigned i = 0; i < count; i++) machine.offered[i] = machine.fibers[first + i].offered;
    machine.meeting_held = true;
}

// True when the threadgroup goes on: all of its threads wait at the same barrier.
bool pass_group_barrier() {
    Fiber *waiting = nullptr;
    size_t count = 0;
    bool same = true;
    for (Fiber &fiber : machine.fibers) {
        if (fiber.state != State::group_barrier) continue;
        if (waiting != nullptr && waiting->site != fiber.site) same = false;
        waiting = &fiber;
        count++;
    }
    if (count == 0 || machine.stopped) return false;
    if (!same || count != machine.fibers.size()) {
        const char *what = waiting->flags == meeting
                               ? "tensor operation after some threads have returned"
                               : "threadgroup_barrier after some threads have returned";
        fault_at(*waiting, MSL_FAULT_BARRIER,
                 same ? what : "threads wait at different threadgroup_barriers");
        machine.stopped = true; // the hardware would hang
        return false;
    }
    if (waiting->flags == meeting) {
        hold_meeting(0, (unsigned)machine.fibers.size());
    } else {
        machine.report->group_barriers++;
        if (machine.image->checked) checker_group_barrier(waiting->flags);
    }
    for (Fiber &fiber : machine.fibers) fiber.state = State::ready;
    return true;
}

} // namespace

uint64_t next_random() {
    machine.random ^= machine.random << 13;
    machine.random ^= machine.random >> 7;
    machine.random ^= machine.random << 17;
    return machine.random;
}

void stop_kernel() {
    machine.stopped = true;
    machine.current->state = State::done;
    leave_fiber();
    abort();
}

void prepare_group(unsigned threads) {
    if (machine.stacks == nullptr) {
        void *memory = mmap(nullptr, stack_size * MSL_MAX_THREADS, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) abort();
        machine.stacks = (char *)memory;
    }
    machine.fibers.resize(threads);
    machine.simdgroups.resize((threads + MSL_SIMD_WIDTH - 1) / MSL_SIMD_WIDTH);
    for (unsigned i = 0; i < machine.simdgroups.size(); i++) {
        unsigned first = i * MSL_SIMD_WIDTH;
        machine.simdgroups[i].first = first;
        machine.simdgroups[i].count = std::min(threads - first, (unsigned)MSL_SIMD_WIDTH);
        machine.simdgroups[i].arrived = 0;
    }
    for (unsigned i = 0; i < threads; i++) {
        Fiber &fiber = machine.fibers[i];
        fiber.stack = machine.stacks + i * stack_size;
        fiber.state = State::ready;
        fiber.depth = 0;
        // As if fiber_main had been called: aligned to 16 with a return address on top.
        void **top = (void **)(fiber.stack + stack_size - 64 - i % stack_colours * stack_colour);
        *--top = nullptr;
        *--top = (void *)fiber_main;
        for (int k = 0; k < 6; k++) *--top = nullptr;
        fiber.stack_pointer = top;
    }
}

void run_group() {
    std::vector<unsigned> order(machine.simdgroups.size());
    for (unsigned i = 0; i < order.size(); i++) order[i] = i;
    do {
        if (machine.random != 0)
            for (size_t i = order.size(); i > 1; i--)
                std::swap(order[i - 1], order[next_random() % i]);
        for (unsigned number : order) run_simdgroup(number);
    } while (pass_group_barrier());
}

} // namespace msl

using msl::machine;

extern "C" unsigned msl_lane() {
    return machine.current->context.lane;
}

extern "C" msl_simd_round *msl_simd_exchange(const void *value, unsigned size, const void *site) {
    msl::Fiber &me = *machine.current;
    msl::Simdgroup &simdgroup = msl::simdgroup_of(me);
    memcpy(simdgroup.values[simdgroup.next][me.context.lane], value, size);
    msl::wait(msl::State::simd_operation, site, 0);
    return &simdgroup.round;
}
extern "C" unsigned msl_thread() {
    return machine.current->context.index_in_group;
}
extern "C" unsigned long msl_seed() {
    return machine.seed;
}

// Lanes of one simdgroup run one after the other until they wait again, so that one list of what
// was offered serves all meetings.
extern "C" void *const *msl_meet(void *mine, unsigned simdgroups, const void *site) {
    msl::Fiber &me = *machine.current;
    me.offered = mine;
    if (simdgroups == 1) {
        msl_simd_round *round = msl_simd_exchange(&mine, sizeof mine, site);
        const msl::Simdgroup &simdgroup = msl::simdgroup_of(me);
        if (round->mask != ~0u || round->done) return nullptr;
        round->done = 1;
        msl::hold_meeting(simdgroup.first, simdgroup.count);
    } else {
        if (machine.fibers.size() != (size_t)simdgroups * MSL_SIMD_WIDTH) {
            msl::add_fault(MSL_FAULT_THREADS, site, {-2, 0},
                           "tensor operation of another number of simdgroups");
            msl::stop_kernel();
        }
        msl::wait(msl::State::group_barrier, site, msl::meeting);
        if (!machine.meeting_held) return nullptr;
    }
    machine.meeting_held = false;
    return machine.offered.data();
}
extern "C" void msl_touch(const void *p, unsigned long size, bool write, const void *site) {
    msl::checker_access((uintptr_t)p, size, write, false, site);
}
extern "C" void *msl_scratch(unsigned long size) {
    static std::vector<char> memory;
    if (memory.size() < size) memory.resize(size);
    return memory.data();
}
extern "C" void msl_beyond_capacity(const void *site) {
    msl::add_fault(MSL_FAULT_OUT_OF_BOUNDS, site, {-2, 0},
                   "element beyond the capacity of a cooperative tensor");
    msl::stop_kernel();
}
extern "C" void msl_threadgroup_barrier(const void *site, int flags) {
    msl::wait(msl::State::group_barrier, site, flags);
}
extern "C" void msl_simdgroup_barrier(const void *site, int flags) {
    msl::wait(msl::State::simd_barrier, site, flags);
}
extern "C" void msl_inactive_lane(const void *site) {
    msl::add_fault(MSL_FAULT_SIMD_PARTIAL, site, {-2, 0}, "value of a lane that takes no part");
}
// Not in Debian 12's libgcc: float to bfloat, to nearest even.
extern "C" __bf16 __truncsfbf2(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bool nan = (bits & 0x7fffffff) > 0x7f800000;
    uint32_t rounded = nan ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
    uint16_t high = (uint16_t)(rounded >> 16);
    __bf16 result;
    memcpy(&result, &high, sizeof result);
    return result;
}
