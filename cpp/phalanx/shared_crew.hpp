// A crew for several threads, of which one has it at a time. Cores to spare are the same for all of them: so there is one for
// all rings of a world. Who finds that another has it works alone, which is better than to wait.
#pragma once

#include <algorithm>
#include <cstddef>
#include <mutex>

#include "crew.hpp"

namespace phalanx {

class SharedCrew {
public:
    explicit SharedCrew(int helpers) noexcept : crew_(helpers) {}

    // As `Crew::dismiss`, from any thread.
    void dismiss() noexcept { crew_.dismiss(); }

    // Calls `work(begin, size)` for all parts of so many bytes, in this thread and in up to `most` others; so many are worth it
    // as `Crew::helpers_for` says. False if nobody would help: then nothing was called. `work` must not throw.
    template <class Work>
    bool share(std::size_t bytes, int most, std::size_t worth, Work& work) noexcept {
        const std::unique_lock turn(taken_, std::try_to_lock);  // in a forked child perhaps never
        const int helpers = turn ? std::min(most, crew_.helpers_for(bytes, worth)) : 0;
        if (helpers <= 0) return false;
        const std::size_t piece = Crew::piece_of(bytes, helpers, worth);
        auto one = [&](std::size_t k, int) { work(k * piece, std::min(piece, bytes - k * piece)); };
        crew_.share((bytes + piece - 1) / piece, helpers, one);
        return true;
    }

private:
    std::mutex taken_;
    Crew crew_;
};

}  // namespace phalanx
