// Memory on the GPU that stands in for an array that other processes cannot open: one that was not made by cuMemAlloc, such as
// those of torch's `expandable_segments` and of JAX. The array is copied there before an operation, or back after it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>

#include "gpu.hpp"

namespace phalanx::cuda {

class StandIn {
public:
    explicit StandIn(const Gpu& gpu) : gpu_(gpu) {}
    ~StandIn() { release(); }
    StandIn(const StandIn&) = delete;
    StandIn& operator=(const StandIn&) = delete;

    // Where so many bytes are; 0 if they cannot be had. They are kept: another process may have opened them.
    Address memory(std::size_t bytes) noexcept {
        if (bytes <= size_) return at_;
        release();
        const std::size_t size = std::bit_ceil(std::max(bytes, smallest));
        if (size > largest || gpu_.driver.cuMemAlloc_v2(&at_, size) != 0) {
            at_ = 0;
            return 0;
        }
        size_ = size;
        return at_;
    }

    void release() noexcept {
        if (at_ != 0) gpu_.driver.cuMemFree_v2(at_);
        at_ = 0;
        size_ = 0;
    }

private:
    static constexpr std::size_t smallest = 2 << 20, largest = std::size_t{1} << 30;

    const Gpu& gpu_;
    Address at_ = 0;
    std::size_t size_ = 0;
};

}  // namespace phalanx::cuda
