// MPI's collectives by the addresses of its functions: whichever MPI the process has loaded, without its headers. A handle is a
// pointer in Open MPI and an int in MPICH; either way it is passed in a register of its own, as a word.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "phalanx/reduce.hpp"

namespace phalanx {

class MpiCalls {
public:
    using Word = std::uintptr_t;
    static constexpr int dtypes = 15;
    static constexpr int ops = 8;

    // `functions`: MPI_Bcast, MPI_Allreduce, MPI_Reduce, MPI_Allgather, MPI_Reduce_scatter_block, MPI_Alltoall. `datatypes` and
    // `operations` are handles by Dtype, and by Dtype and Op; 0 where there is none.
    MpiCalls(const std::vector<Word>& functions, std::intptr_t in_place, Word comm, const std::vector<Word>& datatypes,
             const std::vector<std::vector<Word>>& operations)
        : functions_(functions), in_place_(in_place), comm_(comm), datatypes_(datatypes), operations_(operations) {
        bool complete = functions.size() == 6 && datatypes.size() == dtypes && operations.size() == dtypes;
        for (const std::vector<Word>& of_dtype : operations) complete = complete && of_dtype.size() == ops;
        if (!complete) throw std::invalid_argument("not all of MPI's functions, datatypes and operations");
    }

    // Around every call. `seconds`: how long it may take.
    void enter(std::uint64_t sequence, double seconds) noexcept {
        if (seconds > longest_.load(std::memory_order_relaxed)) longest_.store(seconds, std::memory_order_relaxed);
        inside_.store(sequence, std::memory_order_relaxed);
    }
    void leave() noexcept { inside_.store(0, std::memory_order_relaxed); }

    // The number of the collective that is inside MPI now; 0 if none is.
    std::uint64_t inside() const noexcept { return inside_.load(std::memory_order_relaxed); }
    // Seconds that a call was ever given at most.
    double longest() const noexcept { return longest_.load(std::memory_order_relaxed); }

    // More than this goes the general way, in parts (_MOST in phalanx/group/engines/mpi/engine.py): MPI counts in 31 bits.
    static constexpr std::size_t most = std::size_t{1} << 30;

    bool can_move(Dtype dtype, std::size_t items) const noexcept { return items <= most && datatype(dtype) != 0; }
    bool can_combine(Dtype dtype, int op, std::size_t items) const noexcept {
        return can_move(dtype, items) && operation(dtype, op) != 0;
    }

    // All return MPI's error code, 0 if it went well.

    int broadcast(void* data, std::size_t items, Dtype dtype, int root) const {
        return call<int(void*, int, Word, int, Word)>(0)(data, static_cast<int>(items), datatype(dtype), root, comm_);
    }

    int all_reduce(void* data, std::size_t items, Dtype dtype, int op) const {
        return call<int(const void*, void*, int, Word, Word, Word)>(1)(in_place(), data, static_cast<int>(items), datatype(dtype),
                                                                      operation(dtype, op), comm_);
    }

    int reduce(void* data, std::size_t items, Dtype dtype, int op, int root, bool is_root) const {
        return call<int(const void*, void*, int, Word, Word, int, Word)>(2)(is_root ? in_place() : data, is_root ? data : nullptr,
                                                                           static_cast<int>(items), datatype(dtype),
                                                                           operation(dtype, op), root, comm_);
    }

    int all_gather(const void* source, void* target, std::size_t items, Dtype dtype) const {
        return call<int(const void*, int, Word, void*, int, Word, Word)>(3)(source, static_cast<int>(items), datatype(dtype), target,
                                                                           static_cast<int>(items), datatype(dtype), comm_);
    }

    int reduce_scatter(const void* source, void* target, std::size_t items, Dtype dtype, int op) const {
        return call<int(const void*, void*, int, Word, Word, Word)>(4)(source, target, static_cast<int>(items), datatype(dtype),
                                                                      operation(dtype, op), comm_);
    }

    int all_to_all(const void* source, void* target, std::size_t items, Dtype dtype) const {
        return call<int(const void*, int, Word, void*, int, Word, Word)>(5)(source, static_cast<int>(items), datatype(dtype), target,
                                                                           static_cast<int>(items), datatype(dtype), comm_);
    }

private:
    template <class Signature>
    Signature* call(int number) const noexcept {
        return reinterpret_cast<Signature*>(functions_[static_cast<std::size_t>(number)]);
    }
    const void* in_place() const noexcept { return reinterpret_cast<const void*>(in_place_); }
    Word datatype(Dtype dtype) const noexcept { return datatypes_[static_cast<std::size_t>(dtype)]; }
    Word operation(Dtype dtype, int op) const noexcept {
        return operations_[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)];
    }

    std::vector<Word> functions_;
    std::intptr_t in_place_;
    Word comm_;
    std::vector<Word> datatypes_;
    std::vector<std::vector<Word>> operations_;
    std::atomic<std::uint64_t> inside_{0};
    std::atomic<double> longest_{0.0};
};

}  // namespace phalanx
