// Hands out parts of a range of bytes: the first gap that is large enough. Not for threads at once.
#pragma once

#include <cstddef>
#include <iterator>
#include <map>
#include <optional>

namespace phalanx {

class Heap {
public:
    explicit Heap(std::size_t bytes) {
        if (bytes > 0) gaps_[0] = bytes;
    }

    // Where it begins; nothing if there is no such gap. `bytes` is a multiple of what the caller aligns to.
    std::optional<std::size_t> take(std::size_t bytes) {
        for (auto gap = gaps_.begin(); gap != gaps_.end(); ++gap) {
            const auto [start, length] = *gap;
            if (length < bytes) continue;
            gaps_.erase(gap);
            if (length > bytes) gaps_[start + bytes] = length - bytes;
            return start;
        }
        return std::nullopt;
    }

    void give_back(std::size_t start, std::size_t bytes) {
        auto gap = gaps_.emplace(start, bytes).first;
        const auto after = std::next(gap);
        if (after != gaps_.end() && start + bytes == after->first) {
            gap->second += after->second;
            gaps_.erase(after);
        }
        if (gap == gaps_.begin()) return;
        const auto before = std::prev(gap);
        if (before->first + before->second == start) {
            before->second += gap->second;
            gaps_.erase(gap);
        }
    }

private:
    std::map<std::size_t, std::size_t> gaps_;  // where each begins, and how long it is
};

}  // namespace phalanx
