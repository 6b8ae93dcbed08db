// Plans: what the kernels of src/phalanx/cuda/kernels/combine.cu are to do. No driver in it.
//
// A piece is a run of elements that is read from some addresses, combined in this order, and written to others. A launch has
// up to 64 pieces; a longer plan becomes several launches, one after another.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "driver.hpp"
#include "phalanx/collectives.hpp"

namespace phalanx::cuda {

enum class Kind : int { broadcast, all_reduce, reduce, all_gather, gather, reduce_scatter, all_to_all, scatter };

// A collective on arrays of a GPU, as one rank has it. Lengths are in bytes.
struct Operation {
    Kind kind;
    Address source = 0;
    std::size_t source_bytes = 0;
    Address target = 0;  // 0 where this rank has none, or it is the source
    std::size_t target_bytes = 0;
    Combine how{};  // of a reduction
    int root = -1;
    Lengths counts{0};       // of each rank's part in a gather or scatter; from rank i to rank j in an all_to_all
    std::size_t largest = 0;  // the largest array of any rank: all ranks know it
    // In a scatter, an array of this rank that lies in the memory of the host instead: then all go through that.
    std::byte *host_source = nullptr, *host_target = nullptr;

    bool combines() const noexcept { return kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::reduce_scatter; }
};

struct Piece {
    std::vector<Address> inputs, outputs;
    std::size_t elements = 0;
};

// The parameter of a kernel, as combine.cu has it.
struct Plan {
    static constexpr std::size_t most_pointers = 320, most_pieces = 64;
    struct Row {
        std::uint64_t count;
        std::uint16_t first, inputs, outputs, aligned;
    };
    Address pointers[most_pointers];
    Row rows[most_pieces];
    double divisor;
    Address closed;
    std::uint32_t op;
    std::uint32_t unused;
};
static_assert(sizeof(Plan) == 3608 && sizeof(Plan) <= 4096);

struct Launch {
    Dtype dtype = Dtype::uint8;  // of the kernel
    unsigned blocks = 0, pieces = 0;
    Plan plan{};
};

inline constexpr unsigned threads = 256;
inline constexpr std::size_t per_thread = 16;  // bytes of a piece that a thread has

// The pieces of a collective. Addresses are of the rank that executes it: one source and one target of each rank.
inline std::vector<Piece> pieces_of(const Operation& o, const std::vector<Address>& sources, const std::vector<Address>& targets) {
    const int ranks = static_cast<int>(sources.size());
    std::vector<Piece> pieces;
    const auto add_moves = [&](const std::vector<Address>& to) {
        for (int r = 0; r < ranks; ++r) {
            Piece piece{{sources[r]}, {}, o.counts[r]};
            for (const Address start : to)  // what lies at its place already is left alone
                if (start + o.counts.sum_before(r) != sources[r]) piece.outputs.push_back(start + o.counts.sum_before(r));
            pieces.push_back(std::move(piece));
        }
    };
    switch (o.kind) {
        case Kind::broadcast: {
            Piece piece{{sources[o.root]}, {}, o.source_bytes};
            for (int r = 0; r < ranks; ++r)
                if (r != o.root) piece.outputs.push_back(sources[r]);
            pieces.push_back(std::move(piece));
            break;
        }
        case Kind::all_reduce: pieces.push_back({sources, sources, o.source_bytes / item_size(o.how.dtype)}); break;
        case Kind::reduce: pieces.push_back({sources, {sources[o.root]}, o.source_bytes / item_size(o.how.dtype)}); break;
        case Kind::all_gather: add_moves(targets); break;
        case Kind::gather: add_moves({targets[o.root]}); break;
        case Kind::scatter:
            for (int r = 0; r < ranks; ++r) {
                const Address from = sources[o.root] + o.counts.sum_before(r);
                if (targets[r] != 0 && targets[r] != from) pieces.push_back({{from}, {targets[r]}, o.counts[r]});
            }
            break;
        case Kind::reduce_scatter:
            for (int r = 0; r < ranks; ++r) {
                Piece piece{sources, {targets[r]}, o.target_bytes / item_size(o.how.dtype)};
                for (Address& input : piece.inputs) input += r * o.target_bytes;
                pieces.push_back(std::move(piece));
            }
            break;
        case Kind::all_to_all: {
            std::vector<std::size_t> written(ranks, 0);
            for (int i = 0; i < ranks; ++i) {
                std::size_t read = 0;
                for (int j = 0; j < ranks; ++j) {
                    const std::size_t size = o.counts.row(i, ranks)[j];
                    pieces.push_back({{sources[i] + read}, {targets[j] + written[j]}, size});
                    read += size;
                    written[j] += size;
                }
            }
            break;
        }
    }
    return pieces;
}

// Pieces of bytes that only move, as the widest elements that all of them can be moved by.
inline Dtype widen(std::vector<Piece>& pieces) noexcept {
    std::uint64_t width = 8;
    for (const Piece& piece : pieces) {
        width = std::gcd(width, piece.elements);
        for (const Address address : piece.inputs) width = std::gcd(width, address);
        for (const Address address : piece.outputs) width = std::gcd(width, address);
    }
    for (Piece& piece : pieces) piece.elements /= width;
    return width == 8 ? Dtype::uint64 : width == 4 ? Dtype::uint32 : width == 2 ? Dtype::uint16 : Dtype::uint8;
}

inline std::vector<Launch> launches_of(const std::vector<Piece>& pieces, Dtype dtype, const Combine& how, Address closed) {
    const std::size_t per_block = threads * std::max<std::size_t>(1, per_thread / item_size(dtype));
    std::vector<Launch> made;
    std::size_t pointers = 0;
    for (const Piece& piece : pieces) {
        const std::size_t needed = piece.inputs.size() + piece.outputs.size();
        if (piece.elements == 0 || piece.outputs.empty()) continue;
        if (made.empty() || made.back().pieces == Plan::most_pieces || pointers + needed > Plan::most_pointers) {
            Launch& launch = made.emplace_back();
            launch.dtype = dtype;
            launch.plan.divisor = static_cast<double>(how.divisor);
            launch.plan.closed = closed;
            launch.plan.op = static_cast<std::uint32_t>(how.op);
            pointers = 0;
        }
        Launch& launch = made.back();
        bool aligned = true;
        Plan::Row& row = launch.plan.rows[launch.pieces++];
        row = {piece.elements, static_cast<std::uint16_t>(pointers), static_cast<std::uint16_t>(piece.inputs.size()),
               static_cast<std::uint16_t>(piece.outputs.size()), 0};
        for (const std::vector<Address>* some : {&piece.inputs, &piece.outputs})
            for (const Address address : *some) {
                launch.plan.pointers[pointers++] = address;
                aligned = aligned && address % per_thread == 0;
            }
        row.aligned = aligned ? 1 : 0;
        launch.blocks = std::max(launch.blocks, static_cast<unsigned>((piece.elements + per_block - 1) / per_block));
    }
    return made;
}

// Ranks that a kernel can serve: a piece has the addresses of all, twice.
inline constexpr int most_ranks = Plan::most_pointers / 2;

}  // namespace phalanx::cuda
