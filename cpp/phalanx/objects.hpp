// Collectives on objects, as bytes whose length only their owner knows: each rank shows a block of a fixed length, which says
// so, and which holds the object if it is short. Only if one is longer, a second step follows.
//
// src/phalanx/group/verbs/objects.py does the same, step by step, wherever the core's fast path does not.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "collectives.hpp"

namespace phalanx {

// An object as the codec writes it: its structure, and then its arrays.
struct EncodedObject {
    std::uint64_t head = 0;  // bytes of the structure
    std::span<const std::byte> bytes{};
};

class ObjectMoves {
public:
    static constexpr std::size_t long_block = 1024;  // that one rank has for another
    static constexpr std::size_t short_block = 256;  // where everybody gets those of all

    ObjectMoves(Collectives& ops, int rank, int ranks) : ops_(ops), rank_(rank), ranks_(ranks) {}

    // Those that came, by rank; after a broadcast or a scatter there is one.
    const std::vector<EncodedObject>& found() const noexcept { return found_; }

    // `second(f)` calls f(call) for the steps that a long object needs: they may take a while.

    template <class Second>
    Outcome broadcast(const Call& call, const EncodedObject& mine, int root, Second second) {
        blocks_ = room(long_block);
        if (rank_ == root) write(blocks_.get(), long_block, mine, false);
        Outcome outcome = ops_.broadcast(call, blocks_.get(), long_block, root);
        if (outcome != Outcome::done) return outcome;
        const Header header = read(blocks_.get());
        const std::byte* bytes = blocks_.get() + sizeof(Header);
        if (header.more != 0) {
            outcome = second([&](const Call& rest) {
                everything_ = room(header.size());
                if (rank_ == root) std::memcpy(everything_.get(), mine.bytes.data(), header.size());
                return ops_.broadcast(rest, everything_.get(), header.size(), root);
            });
            bytes = everything_.get();
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
        if (more) {
            outcome = second([&](const Call& rest) {
                everything_ = room(receives ? sum_of(lengths) : 0);
                return root < 0 ? ops_.all_gather(rest, mine.bytes.data(), everything_.get(), lengths)
                                : ops_.gather(rest, mine.bytes.data(), everything_.get(), lengths, root);
            });
        }
        if (outcome != Outcome::done || !receives) return outcome;
        const std::byte* at = everything_.get();
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
            outcome = second([&](const Call& rest) { return scatter_long(rest, all, header.size(), root); });
            bytes = everything_.get();
        }
        found_ = {{header.head, {bytes, header.size()}}};
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

    Outcome scatter_long(const Call& call, std::span<const EncodedObject> all, std::size_t mine, int root) {
        std::vector<std::uint64_t> told(ranks_);
        std::unique_ptr<std::byte[]> every;
        if (rank_ == root) {
            for (int r = 0; r < ranks_; ++r) told[r] = all[r].bytes.size();
            every = room(sum_of({told.begin(), told.end()}));
            std::byte* at = every.get();
            for (const EncodedObject& one : all) at = std::ranges::copy(one.bytes, at).out;
        }
        Outcome outcome = ops_.broadcast(call, reinterpret_cast<std::byte*>(told.data()), ranks_ * sizeof(std::uint64_t), root);
        if (outcome != Outcome::done) return outcome;
        const std::vector<std::size_t> lengths(told.begin(), told.end());
        for (const std::size_t length : lengths)
            if (length > most_bytes) throw std::bad_alloc();
        everything_ = room(std::max(mine, lengths[rank_]));
        return ops_.scatter(call, every.get(), everything_.get(), lengths, root);
    }

    Collectives& ops_;
    const int rank_, ranks_;
    std::unique_ptr<std::byte[]> blocks_, everything_;  // whose memory those that came are
    std::vector<EncodedObject> found_;
};

}  // namespace phalanx
