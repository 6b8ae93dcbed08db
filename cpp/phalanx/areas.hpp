// The memory of an operation that has a part for each rank: where each lies, and how long it is.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

namespace phalanx {

// Bytes of parts: of each its own, or the same of all.
class Lengths {
public:
    explicit constexpr Lengths(std::size_t same) noexcept : same_(same) {}
    Lengths(std::span<const std::size_t> each) noexcept : each_(each) {}
    Lengths(const std::vector<std::size_t>& each) noexcept : each_(each) {}

    std::size_t operator[](int i) const noexcept { return each_.empty() ? same_ : each_[i]; }
    std::size_t longest() const noexcept {
        return each_.empty() ? same_ : *std::max_element(each_.begin(), each_.end());
    }
    std::size_t sum_before(int i) const noexcept {
        if (each_.empty()) return i * same_;
        std::size_t sum = 0;
        for (int k = 0; k < i; ++k) sum += each_[k];
        return sum;
    }
    // One row of a square matrix.
    Lengths row(int i, int columns) const noexcept {
        return each_.empty() ? *this : Lengths(each_.subspan(i * columns, columns));
    }

private:
    std::span<const std::size_t> each_;
    std::size_t same_ = 0;
};

// Memory with one part for each rank: an array, or an address for each part.
template <class Byte>
class Areas {
public:
    Areas(Byte* whole) noexcept : whole_(whole) {}
    static Areas apart(Byte* const* each) noexcept {
        Areas areas(nullptr);
        areas.each_ = each;
        return areas;
    }

    // Rank r's part, which begins at `start` of an array.
    Byte* part(int r, std::size_t start) const noexcept { return each_ != nullptr ? each_[r] : whole_ + start; }
    // Null if the parts lie apart.
    Byte* whole() const noexcept { return whole_; }

private:
    Byte* whole_;
    Byte* const* each_ = nullptr;
};
using Sources = Areas<const std::byte>;
using Targets = Areas<std::byte>;

}  // namespace phalanx
