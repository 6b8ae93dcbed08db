// What measures the machine: that it ends, and does what it is said to do. How fast it is, no test can say.

#include <atomic>
#include <cmath>
#include <cstdio>

#include "check.hpp"
#include "phalanx/machine.hpp"

using namespace phalanx;

namespace {

constexpr Effort little{3, 1'000'000'000};

void a_team_plays_every_round_together() {
    std::atomic<int> calls{0};
    std::atomic<int> inside{0};
    const double seconds = best_round(3, little, [&](int) {
        ++inside;
        while (inside.load() % 3 != 0) sched_yield();  // ends only if all are there
        ++calls;
    });
    CHECK(std::isfinite(seconds));
    CHECK(calls == 3 * (little.rounds + 1));  // one to warm up
}

void time_that_is_over_ends_it_after_one_round() {
    int calls = 0;
    best_round(1, Effort{1000, -1}, [&](int) { ++calls; });
    CHECK(calls == 2);
}

void bytes_move_by_every_way() {
    for (int mover = 0; mover <= static_cast<int>(Mover::ahead); ++mover)
        for (const std::size_t bytes : {1u, 64u, 100u, 40'000u, 3'000'000u}) {
            CHECK(time_movement({bytes, 1, 2, false}, static_cast<Mover>(mover), 2, little) >= 0);
            const double sum = time_movement({bytes, 3, 3, true}, static_cast<Mover>(mover), 2, little);
            const auto is = [mover](Mover other) { return mover == static_cast<int>(other); };
            const bool can_add = !is(Mover::whole) && !is(Mover::by_address);
            CHECK(std::isfinite(sum) == can_add);
        }
}

void copies_are_measured_in_all_ways() {
    for (const std::size_t bytes : {1u, 100u, 1'000'000u})
        for (const double seconds : time_copies(bytes, 3, little)) CHECK(std::isfinite(seconds) && seconds >= 0);
}

void bytes_are_the_same_by_every_way() {
    alignas(64) std::byte from[300], memory[400];
    for (const CopyBy by : {CopyBy::plain, CopyBy::ahead, CopyBy::past})
        for (const std::size_t start : {0u, 1u, 16u, 63u}) {
            std::byte* const to = memory + start;
            for (const std::size_t size : {0u, 1u, 62u, 63u, 64u, 65u, 200u, 300u}) {
                for (int i = 0; i < 300; ++i) {
                    from[i] = static_cast<std::byte>(i * 7);
                    to[i] = std::byte{1};
                }
                copy_by(by, to, from, size);
                for (std::size_t i = 0; i < 300; ++i) CHECK(to[i] == (i < size ? from[i] : std::byte{1}));
            }
        }
}

void waiting_has_a_price() {
    CHECK(time_look(little) > 0);
    CHECK(time_wake_up(3, 5'000'000'000) > 0);
    CHECK(std::isinf(time_wake_up(3, -1'000'000)));  // no time at all
}

void a_segment_is_measured_with_its_settings() {
    const Layout layout{3, 64 << 10, 0};
    for (const std::size_t bytes : {0u, 40u, 5'000u, 200'000u})
        for (const std::size_t by_all : {0u, 1u << 30})
            CHECK(std::isfinite(time_all_reduce(bytes, layout, Patience{20, 4}, Thresholds{by_all}, 3, little)));
    for (const std::size_t once_from : {std::size_t{1}, Thresholds::never})
        for (const std::size_t bytes : {40u, 5'000u, 200'000u})
            CHECK(std::isfinite(time_gather(bytes, Layout{2, 64 << 10, 0}, Patience{20, 4},
                                            Thresholds{.copy_once_from = once_from, .gather_at_home_from = 0}, 3, little)));
}

}  // namespace

int main() {
    a_team_plays_every_round_together();
    time_that_is_over_ends_it_after_one_round();
    bytes_move_by_every_way();
    copies_are_measured_in_all_ways();
    bytes_are_the_same_by_every_way();
    waiting_has_a_price();
    a_segment_is_measured_with_its_settings();
    std::printf("%d checks, %d failures\n", checks.load(), failures.load());
    return failures == 0 ? 0 : 1;
}
