// Collectives on objects, as bytes whose length only their owner knows: each rank shows a block of a fixed length, which says
// so, and which holds the object if it is short. Only if one is longer, a second step follows.
//
// src/phalanx/group/verbs/objects.py does the same, step by step, wherever the core's fast path does not.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "collectives.hpp"

namespace phalanx {

// An object as the codec writes it: its structure, and then its arrays.
struct EncodedObject {
    std::uint64_t head = 0;  // bytes of the structure
    std::span<const std::byte> bytes{};
};

// Asks for large pages for long memory that was not touched yet, as NumPy does: else the kernel is asked for each page of it.
inline void expect_long(std::byte* memory, std::size_t bytes) noexcept {
    constexpr std::size_t worth_it = 4 << 20, page = 4096;
    if (bytes < worth_it) return;
    void* first = memory;
    std::size_t left = bytes;
    if (std::align(page, 1, first, left) != nullptr) ::madvise(first, left, MADV_HUGEPAGE);
}

class ObjectMoves {
public:
    static constexpr std::size_t long_block = 1024;  // that one rank has for another
    static constexpr std::size_t short_block = 256;  // where everybody gets those of all

    ObjectMoves(Collectives& ops, int rank, int ranks) : ops_(ops), rank_(rank), ranks_(ranks) {}

    // Those that came, by rank; after a broadcast or a scatter there is one, but not on the root of a scatter.
    const std::vector<EncodedObject>& found() const noexcept { return found_; }

    // `second(bytes, f)` returns f(call, room) with memory for so many bytes, which stays as long as what was found: for the
    // steps that a long object needs, which may take a while.

    template <class Second>
    Outcome broadcast(const Call& call, const EncodedObject& mine, int root, Second second) {
        blocks_ = room(long_block);
        if (rank_ == root) write(blocks_.get(), long_block, mine, false);
        Outcome outcome = ops_.broadcast(call, blocks_.get(), long_block, root);
        if (outcome != Outcome::done) return outcome;
        const Header header = read(blocks_.get());
        const std::byte* bytes = blocks_.get() + sizeof(Header);
        if (header.more != 0) {
            outcome = second(rank_ == root ? 0 : header.size(), [&](const Call& rest, std::byte* room) {
                // The root's is only read.
                bytes = rank_ == root ? mine.bytes.data() : room;
                return ops_.broadcast(rest, const_cast<std::byte*>(bytes), header.size(), root);
            });
        }
        found_ = {{header.head, {bytes, header.size()}}};
        return outcome;
    }

    // With a root, only that one gets them.
    template <class Second>
    Outcome gather(const Call& call, const EncodedObject& mine, int root, Second second) {
        std::array<std::byte, short_block> own{};
        write(own.data(), short_block, mine, false);
        blocks_ = room(ranks_ * short_block);
        Outcome outcome = ops_.all_gather(call, own.data(), blocks_.get(), Lengths(short_block));
        if (outcome != Outcome::done) return outcome;
        bool more = false;
        std::vector<Header> headers;
        std::vector<std::size_t> lengths;
        for (int r = 0; r < ranks_; ++r) {
            headers.push_back(read(blocks_.get() + r * short_block));
            lengths.push_back(headers.back().size());
            more = more || headers.back().more != 0;
        }
        const bool receives = root < 0 || rank_ == root;
        const std::byte* at = nullptr;
        if (more) {
            outcome = second(receives ? sum_of(lengths) : 0, [&](const Call& rest, std::byte* room) {
                at = room;
                return root < 0 ? ops_.all_gather(rest, mine.bytes.data(), room, lengths)
                                : ops_.gather(rest, mine.bytes.data(), room, lengths, root);
            });
        }
        if (outcome != Outcome::done || !receives) return outcome;
        for (int r = 0; r < ranks_; at += lengths[r++]) {
            const std::byte* const bytes = more ? at : blocks_.get() + r * short_block + sizeof(Header);
            found_.push_back({headers[r].head, {bytes, lengths[r]}});
        }
        return outcome;
    }

    // `all`: one for each rank, on the root.
    template <class Second>
    Outcome scatter(const Call& call, std::span<const EncodedObject> all, int root, Second second) {
        std::unique_ptr<std::byte[]> every;
        if (rank_ == root) {
            every = room(ranks_ * long_block);
            const bool more = std::ranges::any_of(all, [](const EncodedObject& one) { return !fits(one, long_block); });
            for (int r = 0; r < ranks_; ++r) write(every.get() + r * long_block, long_block, all[r], more);
        }
        blocks_ = room(long_block);
        Outcome outcome = ops_.scatter(call, every.get(), blocks_.get(), Lengths(long_block), root);
        if (outcome != Outcome::done) return outcome;
        const Header header = read(blocks_.get());
        const std::byte* bytes = blocks_.get() + sizeof(Header);
        if (header.more != 0) {
            outcome = second(rank_ == root ? 0 : header.size(), [&](const Call& rest, std::byte* room) {
                bytes = room;
                return scatter_long(rest, all, {room, header.size()}, root);
            });
        }
        if (rank_ != root) found_ = {{header.head, {bytes, header.size()}}};
        return outcome;
    }

private:
    // As `HEADER` in objects.py.
    struct Header {
        std::uint64_t head;
        std::uint64_t rest;
        std::uint64_t more;  // whether a second step follows

        std::size_t size() const noexcept { return head + rest; }
    };
    // Nobody can have sent more: what another rank says is not believed.
    static constexpr std::uint64_t most_bytes = std::uint64_t{1} << 46;

    static bool fits(const EncodedObject& object, std::size_t block) noexcept { return sizeof(Header) + object.bytes.size() <= block; }

    static void write(std::byte* to, std::size_t block, const EncodedObject& object, bool more) noexcept {
        const bool inside = fits(object, block);
        const Header header{object.head, object.bytes.size() - object.head, more || !inside ? 1u : 0u};
        std::memcpy(to, &header, sizeof(header));
        if (inside && !object.bytes.empty()) std::memcpy(to + sizeof(header), object.bytes.data(), object.bytes.size());
    }

    static Header read(const std::byte* block) {
        Header header;
        std::memcpy(&header, block, sizeof(header));
        if (header.head > most_bytes || header.rest > most_bytes) throw std::bad_alloc();
        return header;
    }

    static std::size_t sum_of(const std::vector<std::size_t>& lengths) noexcept {
        std::size_t sum = 0;
        for (const std::size_t length : lengths) sum += length;
        return sum;
    }

    static std::unique_ptr<std::byte[]> room(std::size_t bytes) { return std::make_unique_for_overwrite<std::byte[]>(bytes); }

    Outcome scatter_long(const Call& call, std::span<const EncodedObject> all, std::span<std::byte> mine, int root) {
        std::vector<std::uint64_t> told(ranks_);
        std::unique_ptr<std::byte[]> every;
        if (rank_ == root) {
            for (int r = 0; r < ranks_; ++r) told[r] = all[r].bytes.size();
            const std::size_t bytes = sum_of({told.begin(), told.end()});
            every = room(bytes);
            expect_long(every.get(), bytes);
            std::size_t at = 0;
            for (int r = 0; r < ranks_; at += told[r++]) {
                std::ranges::copy(all[r].bytes, every.get() + at);
                if (r == root) mine = {every.get() + at, told[r]};  // its own stays where it is
            }
        }
        Outcome outcome = ops_.broadcast(call, reinterpret_cast<std::byte*>(told.data()), ranks_ * sizeof(std::uint64_t), root);
        if (outcome != Outcome::done) return outcome;
        const std::vector<std::size_t> lengths(told.begin(), told.end());
        if (*std::ranges::max_element(lengths) > most_bytes || lengths[rank_] != mine.size()) throw std::bad_alloc();
        return ops_.scatter(call, every.get(), mine.data(), lengths, root);
    }

    Collectives& ops_;
    const int rank_, ranks_;
    std::unique_ptr<std::byte[]> blocks_;  // whose memory short ones that came are
    std::vector<EncodedObject> found_;
};

}  // namespace phalanx
