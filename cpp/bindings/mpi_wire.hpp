// MPI's functions for messages, by their addresses, as in mpi_calls.hpp.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

namespace phalanx {

// The functions that messages need, and the handles that they need. MPI_Request is a pointer or an int: a word holds either.
class MpiWire {
public:
    using Word = std::uintptr_t;

    // `functions`: MPI_Isend, MPI_Irecv, MPI_Test, MPI_Cancel, MPI_Iprobe, MPI_Get_count, MPI_Recv. `heads` and `bodies` are
    // communicators. Heads have the tag 0, a body its message's number modulo `highest_tag`.
    MpiWire(const std::vector<Word>& functions, Word heads, Word bodies, Word byte, int anyone, int highest_tag)
        : heads_(heads), bodies_(bodies), byte_(byte), anyone_(anyone), highest_tag_(highest_tag) {
        if (functions.size() != functions_.size() || highest_tag <= 0) throw std::invalid_argument("not all that messages need");
        std::copy(functions.begin(), functions.end(), functions_.begin());
    }

    bool begin_head(const void* data, std::size_t bytes, int dst, Word& request) const {
        return begin_send(data, bytes, dst, 0, heads_, request);
    }
    bool begin_body(const void* data, std::size_t bytes, int dst, std::uint64_t number, Word& request) const {
        return begin_send(data, bytes, dst, tag_of(number), bodies_, request);
    }
    bool expect_body(void* data, std::size_t bytes, int src, std::uint64_t number, Word& request) const {
        return call<int(void*, int, Word, int, int, Word, Word*)>(1)(data, static_cast<int>(bytes), byte_, src, tag_of(number),
                                                                    bodies_, &request) == 0;
    }

    bool test(Word& request) const {
        int done = 0;
        Status status;
        return call<int(Word*, int*, Status*)>(2)(&request, &done, &status) == 0 && done != 0;
    }

    void cancel(Word& request) const { call<int(Word*)>(3)(&request); }

    // The bytes of the next head of a rank; -1 if there is none.
    int waiting(int src) const {
        int found = 0, bytes = 0;
        Status status;
        if (call<int(int, int, Word, int*, Status*)>(4)(src, 0, heads_, &found, &status) != 0 || found == 0) return -1;
        return call<int(const Status*, Word, int*)>(5)(&status, byte_, &bytes) == 0 ? bytes : -1;
    }
    bool anything_waits() const { return waiting(anyone_) >= 0; }

    bool receive_head(void* data, int bytes, int src) const {
        Status status;
        return call<int(void*, int, Word, int, int, Word, Status*)>(6)(data, bytes, byte_, src, 0, heads_, &status) == 0;
    }

private:
    struct alignas(16) Status {
        std::byte bytes[64];  // more than any MPI's
    };

    template <class Signature>
    Signature* call(std::size_t number) const noexcept {
        return reinterpret_cast<Signature*>(functions_[number]);
    }

    bool begin_send(const void* data, std::size_t bytes, int dst, int tag, Word comm, Word& request) const {
        return call<int(const void*, int, Word, int, int, Word, Word*)>(0)(data, static_cast<int>(bytes), byte_, dst, tag, comm,
                                                                          &request) == 0;
    }

    int tag_of(std::uint64_t number) const noexcept {
        return static_cast<int>(number % static_cast<std::uint64_t>(highest_tag_));
    }

    std::array<Word, 7> functions_;
    Word heads_, bodies_, byte_;
    int anyone_, highest_tag_;
};

// What MPI has not finished yet. Python tests it and calls it off as it does mpi4py's requests.
class MpiRequest {
public:
    // `bytes` of memory of its own, which a body does not need.
    explicit MpiRequest(const MpiWire& wire, std::size_t bytes = 0)
        : wire_(wire), data(bytes == 0 ? nullptr : std::make_unique_for_overwrite<std::byte[]>(bytes)), bytes(bytes) {}

    bool begin_head(int dst) { return wire_.begin_head(data.get(), bytes, dst, request_); }
    bool begin_body(const void* from, std::size_t size, int dst, std::uint64_t number) {
        return wire_.begin_body(from, size, dst, number, request_);
    }
    bool expect_body(void* to, std::size_t size, int src, std::uint64_t number) {
        return wire_.expect_body(to, size, src, number, request_);
    }
    bool test() { return done_ || (done_ = wire_.test(request_)); }
    void cancel() {
        if (!done_) wire_.cancel(request_);
    }

private:
    const MpiWire wire_;  // a copy: this may outlast the group
    MpiWire::Word request_ = 0;
    bool done_ = false;

public:
    const std::unique_ptr<std::byte[]> data;
    const std::size_t bytes;
};

}  // namespace phalanx
