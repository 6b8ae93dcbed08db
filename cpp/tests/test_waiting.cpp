// How long a rank tries before it sleeps. The waits themselves are tested by what waits: segments and rings.

#include "phalanx/waiting.hpp"
#include "phalanx/spreading.hpp"

#include <chrono>
#include <thread>

#include "check.hpp"

using namespace phalanx;

namespace {

constexpr std::int64_t millisecond = 1'000'000;

void short_sleeps_make_a_rank_try_longer() {
    Stamina stamina;
    CHECK(stamina.times() == 1);
    stamina.slept(millisecond);
    CHECK(stamina.times() == 2);
    for (int i = 0; i < 10; ++i) stamina.slept(millisecond);
    CHECK(stamina.times() == 16);
    stamina.slept(100 * millisecond);
    CHECK(stamina.times() == 1);
}

// Sleeps until another thread rings, after so long.
void sleep_for(Stamina& stamina, std::int64_t ns) {
    Bell bell;
    Shared<std::uint32_t> aborted{0}, rung{0};
    std::thread ringer([&] {
        std::this_thread::sleep_for(std::chrono::nanoseconds(ns));
        rung.store(1, std::memory_order_seq_cst);
        bell.announce();
    });
    Bound bound;
    bound.deadline_ns = monotonic_ns() + 10'000 * millisecond;
    bound.aborted = &aborted;
    bound.stamina = &stamina;
    CHECK(wait_until(bell, Patience{1, 0}, bound, [&] { return rung.load(std::memory_order_acquire) != 0; }) == Outcome::done);
    ringer.join();
}

void all_who_are_too_many_on_a_core_move() {
    // Of sixteen ranks thirteen are on core 0: all but eight of them are too many, and nobody on core 1.
    const auto core_of = [](int rank) { return rank % 5 == 4 ? 1 : 0; };
    int moving = 0;
    for (int rank = 0; rank < 16; ++rank) moving += Spreading::is_surplus(rank, core_of(rank), 8, core_of) ? 1 : 0;
    CHECK(moving == 5);
    for (int rank = 0; rank < 16; ++rank)
        CHECK(!Spreading::is_surplus(rank, rank % 2, 8, [](int other) { return other % 2; }));
}

void a_wait_that_sleeps_tells() {
    Stamina stamina;
    for (int i = 0; i < 8; ++i) stamina.slept(0);
    sleep_for(stamina, 50 * millisecond);
    CHECK(stamina.times() == 1);
}

}  // namespace

int main() {
    short_sleeps_make_a_rank_try_longer();
    all_who_are_too_many_on_a_core_move();
    a_wait_that_sleeps_tells();
    std::printf("%d checks, %d failures\n", checks.load(), failures.load());
    return failures == 0 ? 0 : 1;
}
