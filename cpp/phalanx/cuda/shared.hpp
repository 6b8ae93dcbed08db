// Memory of a GPU that another process may open: who tells of it, and who opens it.
//
// An allocation has a handle, by which other processes open it as a whole; an array is a place in it. Its buffer id tells it
// from another one that came to lie at the same address later.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>

#include "gpu.hpp"

namespace phalanx::cuda {

// An allocation, for other processes. One without a size cannot be opened.
struct Reference {
    std::uint64_t buffer = 0;  // 0: it is not memory of this GPU
    Address base = 0;  // in the process that it belongs to
    std::uint64_t size = 0;
    Handle handle{};
};

// An array, for other ranks. Buffer 0: they cannot open its memory.
struct Place {
    std::uint64_t buffer = 0;
    Address address = 0;

    static constexpr std::uint64_t nothing = ~std::uint64_t{0};  // the buffer of an array without elements
};

// What this process tells. Each allocation is exported once.
class Exports {
public:
    explicit Exports(const Gpu& gpu) : gpu_(gpu) {}

    // `is_opened`: others will open it. The executor's own memory need not be such that they can.
    Place place_of(Address address, std::size_t bytes, bool is_opened) {
        if (bytes == 0) return {Place::nothing, 0};
        std::uint64_t buffer = 0;
        if (gpu_.driver.cuPointerGetAttribute(&buffer, buffer_id, address) != 0) return {};
        const Reference& known = reference(buffer, address);
        return {is_opened && known.size == 0 ? 0 : known.buffer, address};
    }

    const Reference& reference(std::uint64_t buffer, Address address) {
        const auto found = known_.find(buffer);
        if (found != known_.end()) return found->second;
        if (known_.size() >= kept) known_.clear();
        return known_[buffer] = made(buffer, address);
    }

private:
    static constexpr std::size_t kept = 4096;
    // CUpointer_attribute
    static constexpr int memory_type = 2, buffer_id = 7, ordinal = 9, has_handle = 10, range_start = 11, range_size = 12;
    static constexpr unsigned on_device = 2;

    Reference made(std::uint64_t buffer, Address address) const {
        unsigned type = 0;
        int number = -1, can_export = 0;
        Reference made;
        int wanted[] = {memory_type, ordinal, has_handle, range_start, range_size};
        std::size_t size = 0;
        void* places[] = {&type, &number, &can_export, &made.base, &size};
        if (gpu_.driver.cuPointerGetAttributes(5, wanted, places, address) != 0) return {};
        if (type != on_device || number != gpu_.number) return {};
        made.buffer = buffer;
        if (can_export != 0 && gpu_.driver.cuIpcGetMemHandle(&made.handle, made.base) == 0) made.size = size;
        return made;
    }

    const Gpu& gpu_;
    std::unordered_map<std::uint64_t, Reference> known_;
};

// The memory of other ranks that this process has opened, each once.
class Imports {
public:
    explicit Imports(const Gpu& gpu) : gpu_(gpu) {}
    ~Imports() {
        for (const auto& [key, opened] : opened_) gpu_.driver.cuIpcCloseMemHandle(opened.here);
    }
    Imports(const Imports&) = delete;
    Imports& operator=(const Imports&) = delete;

    bool has(int rank, const Place& place) const { return opened_.count({rank, place.buffer}) != 0; }

    // Where a place of another rank lies here; it must be open.
    Address at(int rank, const Place& place) const {
        const Opened& opened = opened_.at({rank, place.buffer});
        return opened.here + (place.address - opened.there.base);
    }

    // False if it cannot be opened: another container, or a driver that forbids it. `closed`: set if other memory was closed,
    // which the rank has freed, for where it lay there lies this now.
    bool open(int rank, const Reference& there, bool& closed) {
        for (auto one = opened_.begin(); one != opened_.end();) {
            const Reference& old = one->second.there;
            if (one->first.first == rank && old.base < there.base + there.size && there.base < old.base + old.size) {
                gpu_.driver.cuIpcCloseMemHandle(one->second.here);
                one = opened_.erase(one);
                closed = true;
            } else {
                ++one;
            }
        }
        constexpr unsigned lazy_peer_access = 1;
        Address here = 0;
        if (there.size == 0 || gpu_.driver.cuIpcOpenMemHandle_v2(&here, there.handle, lazy_peer_access) != 0) return false;
        opened_[{rank, there.buffer}] = {there, here};
        return true;
    }

private:
    struct Opened {
        Reference there;
        Address here = 0;
    };

    const Gpu& gpu_;
    std::map<std::pair<int, std::uint64_t>, Opened> opened_;  // by rank and buffer
};

}  // namespace phalanx::cuda
