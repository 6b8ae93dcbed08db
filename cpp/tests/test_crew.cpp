// Threads that share work, without Python. Run under the sanitizers by `make sanitize`.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "check.hpp"
#include "phalanx/crew.hpp"
#include "phalanx/shared_crew.hpp"

using namespace phalanx;

namespace {

// Every piece is done once, by one of the hands, and all of it is there when `share` returns.
void all_pieces(int helpers) {
    Crew crew(helpers);
    for (int turn = 0; turn < 3000; ++turn) {
        const std::size_t pieces = static_cast<std::size_t>(turn % 41);
        std::vector<int> done(pieces, 0);
        std::atomic<int> wrong{0};
        auto work = [&](std::size_t piece, int hand) {
            if (hand < 0 || hand > helpers) wrong.fetch_add(1);
            done[piece] += turn + 1;
        };
        crew.share(pieces, turn % 3 == 0 ? helpers : 1 + turn % 4, work);
        CHECK(wrong.load() == 0);
        CHECK(std::accumulate(done.begin(), done.end(), 0) == static_cast<int>(pieces) * (turn + 1));
    }
}

// They do take part: each hand waits for all others to come. And each does what was dealt out to it.
void together() {
    constexpr int helpers = 3;
    Crew crew(helpers);
    std::atomic<int> inside{0}, others_piece{0};
    auto work = [&](std::size_t piece, int hand) {
        if (piece != static_cast<std::size_t>(hand)) others_piece.fetch_add(1);
        inside.fetch_add(1);
        while (inside.load() < helpers + 1) sched_yield();
    };
    crew.share(helpers + 1, helpers, work);
    CHECK(inside.load() == helpers + 1 && others_piece.load() == 0);
}

// A forked child does its work alone, and may let go of the crew.
void forked() {
    auto crew = std::make_unique<Crew>(2);
    std::atomic<int> done{0};
    auto work = [&](std::size_t, int) { done.fetch_add(1); };
    crew->share(8, 2, work);
    const pid_t child = fork();
    if (child == 0) {
        crew->share(8, 2, work);
        crew.reset();
        _exit(done.load() == 16 ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    crew->share(8, 2, work);
    CHECK(done.load() == 16);
}

// Denormal numbers are zero for the helpers when they are for the one whom they help, and not otherwise.
void flush_to_zero(bool wanted) {
#if defined(__aarch64__)
    std::uint64_t word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    word = wanted ? word | (1u << 24) : word & ~std::uint64_t{1u << 24};
    asm volatile("msr fpcr, %0" : : "r"(word));
#elif defined(__x86_64__)
    _mm_setcsr(wanted ? _mm_getcsr() | 0x8040 : _mm_getcsr() & ~0x8040u);
#endif
}

void as_the_caller() {
    constexpr int helpers = 2;
    Crew crew(helpers);
    for (int turn = 0; turn < 20; ++turn) {
        std::atomic<int> inside{0}, zeros{0};
        auto work = [&](std::size_t, int) {
            volatile double tiny = 1e-310, half = 0.5;
            if (tiny * half == 0.0) zeros.fetch_add(1);
            inside.fetch_add(1);
            // All at once, but not if fewer are called because one was late.
            const std::int64_t until = monotonic_ns() + 200'000'000;
            while (inside.load() < helpers + 1 && monotonic_ns() < until) sched_yield();
        };
        flush_to_zero(turn % 2 == 0);
        crew.share(helpers + 1, helpers, work);
        flush_to_zero(false);
        CHECK(zeros.load() == (turn % 2 == 0 ? helpers + 1 : 0));
    }
}

// Helpers that keep the one with the work waiting are called less and less.
void late_helpers() {
    using namespace std::chrono_literals;
    Crew crew(1);
    int shared = 0;
    for (int turn = 0; turn < 40; ++turn) {
        std::atomic<bool> came{false};
        auto work = [&](std::size_t, int hand) {
            if (hand == 1) {
                came = true;
                std::this_thread::sleep_for(30ms);
            }
            for (int i = 0; i < 20 && hand == 0 && !came; ++i) std::this_thread::sleep_for(1ms);
        };
        crew.share(2, 1, work);
        if (came) ++shared;
    }
    CHECK(shared >= 2 && shared <= 12);
}

// Of several, fewer take part after one was late, and all again later on.
void fewer_helpers() {
    using namespace std::chrono_literals;
    Crew crew(3);
    const auto hands = [&](std::chrono::milliseconds delay) {
        std::atomic<std::uint32_t> seen{0};
        auto work = [&](std::size_t, int hand) {
            seen.fetch_or(std::uint32_t{1} << hand);
            std::this_thread::sleep_for(hand == 0 ? 1ms : 1ms + delay);
        };
        crew.share(24, 3, work);
        return std::popcount(seen.load());
    };
    CHECK(hands(40ms) == 4);
    CHECK(hands(0ms) == 2);
    int most = 0;
    for (int turn = 0; turn < 40 && most < 4; ++turn) most = std::max(most, hands(0ms));
    CHECK(most == 4);
}

// They look for more work where it came soon, and sleep where it did not.
void they_sleep() {
    using namespace std::chrono_literals;
    Crew crew(3);
    auto work = [](std::size_t, int) {};
    for (int turn = 0; turn < 1000; ++turn) crew.share(8, 3, work);
    const std::clock_t before = std::clock();
    std::this_thread::sleep_for(300ms);
    CHECK(std::clock() - before < CLOCKS_PER_SEC / 10);
}

// Who is let go while there is work leaves it to the one who has it.
void dismissed() {
    Crew crew(3);
    std::atomic<int> done{0};
    auto work = [&](std::size_t piece, int) {
        if (piece == 20) crew.dismiss();
        done.fetch_add(1);
    };
    for (int turn = 0; turn < 3; ++turn) crew.share(100, 3, work);
    CHECK(done.load() == 300);
}

// Pieces of any length make up the whole, and are not too many.
void lengths_of_pieces() {
    constexpr std::size_t worth = 1 << 20;
    for (const int helpers : {1, 3, 7})
        for (const std::size_t bytes : {worth, worth + 1, 8 * worth + 12345, 100 * worth}) {
            const std::size_t piece = Crew::piece_of(bytes, helpers, worth);
            CHECK(piece % 64 == 0 && piece >= worth / 8 && piece <= worth / 2);
            CHECK(bytes / piece >= 2 * static_cast<std::size_t>(helpers) || bytes < worth * static_cast<std::size_t>(helpers));
        }
}

// Several threads want it at the same time: each has all of its work done, whoever does it, also while the crew is let go.
void wanted_by_several() {
    SharedCrew crew(3);
    constexpr std::size_t worth = 1024, longest = 9000;
    std::atomic<int> helped{0}, alone{0};
    const auto user = [&](std::size_t seed) {
        for (std::size_t turn = 0; turn < 400; ++turn) {
            const std::size_t bytes = (seed * 997 + turn * 131) % longest;
            std::vector<int> done(bytes, 0);
            auto work = [&](std::size_t begin, std::size_t size) {
                for (std::size_t i = begin; i < begin + size; ++i) ++done[i];
            };
            const bool shared = crew.share(bytes, 2, worth, work);
            if (!shared) work(0, bytes);
            (shared ? helped : alone).fetch_add(1);
            CHECK(!shared || bytes >= worth);
            CHECK(std::all_of(done.begin(), done.end(), [](int times) { return times == 1; }));
            if (seed == 0 && turn == 300) crew.dismiss();
        }
    };
    std::vector<std::thread> users;
    for (std::size_t seed = 0; seed < 4; ++seed) users.emplace_back(user, seed);
    for (std::thread& each : users) each.join();
    CHECK(helped.load() > 0 && alone.load() > 0);
}

// While one has it, another is told at once that nobody helps.
void one_at_a_time() {
    SharedCrew crew(1);
    bool other = true;
    auto nothing = [](std::size_t, std::size_t) {};
    auto work = [&](std::size_t begin, std::size_t) {
        if (begin == 0) std::thread([&] { other = crew.share(4096, 1, 1024, nothing); }).join();
    };
    CHECK(crew.share(4096, 1, 1024, work));
    CHECK(!other);
    CHECK(crew.share(4096, 1, 1024, nothing));
    CHECK(!crew.share(4096, 0, 1024, nothing));
}

}  // namespace

int main() {
    for (const int helpers : {0, 1, 3}) all_pieces(helpers);
    for (int turn = 0; turn < 20; ++turn) together();
    as_the_caller();
    late_helpers();
    fewer_helpers();
    they_sleep();
    for (int turn = 0; turn < 50; ++turn) dismissed();
    forked();
    lengths_of_pieces();
    wanted_by_several();
    one_at_a_time();
    std::printf("%d checks, %d failed\n", checks.load(), failures.load());
    return failures == 0 ? 0 : 1;
}
