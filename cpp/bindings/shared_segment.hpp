// A mapped segment as Python holds it: shared by the group, its fast path, and the arrays of `Group.empty`.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "phalanx/collectives.hpp"
#include "phalanx/heap.hpp"
#include "phalanx/mapping.hpp"

namespace phalanx {

// The memory and this rank's heap in it; lives as long as the last array.
class SharedMemory {
public:
    SharedMemory(int fd, const Layout& layout) : mapping_(fd, layout.bytes()), heap_(layout.heap_bytes) {}

    std::byte* at() const noexcept { return mapping_.at(); }

    std::optional<std::size_t> take(std::size_t bytes) {
        const std::lock_guard guard(lock_);
        const auto start = retired_ ? std::nullopt : heap_.take(bytes);
        if (start) ++arrays_;
        return start;
    }

    // Also gives the pages back to the machine, unless they are this process's alone: then nobody gets that place again.
    void give_back(std::byte* heap, std::size_t start, std::size_t bytes) {
        const bool reusable = mapping_.release(heap + start, bytes);
        const std::lock_guard guard(lock_);
        if (reusable) heap_.give_back(start, bytes);
        if (--arrays_ == 0 && retired_) mapping_.forget();
    }

    // There will be no more operations, and no more arrays.
    void retire() {
        const std::lock_guard guard(lock_);
        retired_ = true;
        if (arrays_ == 0) mapping_.forget();
    }

    bool detach(std::byte* at, std::size_t bytes) { return mapping_.detach(at, bytes); }

private:
    Mapping mapping_;
    std::mutex lock_;
    Heap heap_;
    std::size_t arrays_ = 0;
    bool retired_ = false;
};

class SharedSegment {
public:
    SharedSegment(int fd, int rank, const Layout& layout, const Patience& patience, const Thresholds& thresholds)
        : memory(std::make_shared<SharedMemory>(fd, layout)),
          segment(memory->at(), layout, rank, patience, thresholds),
          ops(segment) {}

    // After an operation has failed: puts its arrays out of everybody's reach, also of a rank that is stopped in the middle
    // of writing to them, or of reading them by their address. The group is broken for good, so nobody needs to share them
    // again. False if there is no memory.
    bool detach(std::initializer_list<std::pair<std::byte*, std::size_t>> arrays) {
        proof.erase();
        bool all = true;
        for (const auto& [at, bytes] : arrays)
            if (segment.offset_of(at, bytes) != 0 && !memory->detach(at, bytes)) all = false;
        return all;
    }

    std::shared_ptr<SharedMemory> memory;
    Segment segment;
    Collectives ops;
    OwnProof proof;
};

}  // namespace phalanx
