// Threads that share work, without Python. Run under the sanitizers by `make sanitize`.

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <numeric>
#include <vector>

#include "check.hpp"
#include "phalanx/crew.hpp"

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

// They do take part: each hand waits for all others to come.
void together() {
    constexpr int helpers = 3;
    Crew crew(helpers);
    std::atomic<int> inside{0};
    auto work = [&](std::size_t, int) {
        inside.fetch_add(1);
        while (inside.load() < helpers + 1) sched_yield();
    };
    crew.share(helpers + 1, helpers, work);
    CHECK(inside.load() == helpers + 1);
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

}  // namespace

int main() {
    for (const int helpers : {0, 1, 3}) all_pieces(helpers);
    for (int turn = 0; turn < 20; ++turn) together();
    forked();
    std::printf("%d checks, %d failed\n", checks.load(), failures.load());
    return failures == 0 ? 0 : 1;
}
