// One side of a ring as Python holds it: the mapped memory, and who is inside a call on it.
#pragma once

#include <nanobind/nanobind.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <bit>
#include <cstring>
#include <new>
#include <optional>

#include "phalanx/message_loans.hpp"

namespace phalanx {

// Below this, bytes are moved sooner than another thread could make use of the GIL.
constexpr std::size_t worth_releasing = 64 << 10;

// The GIL guards all of it. Whoever lets go of the GIL while it uses the memory is counted, and the memory stays until it
// is out. Only one thread at a time moves bytes: the one that holds the channel's lock.
template <class Half, class Loans>
class MappedRing {
public:
    MappedRing(int memory, std::size_t size, int socket) : size_(size) {
        struct stat found{};
        if (fstat(memory, &found) != 0) raise_errno();
        if (!std::has_single_bit(size) || static_cast<std::uint64_t>(found.st_size) != bytes())
            throw nanobind::value_error("the memory does not have the size of such a ring");
        void* at = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
        if (at == MAP_FAILED) raise_errno();
        memory_ = at;
        half_.emplace(memory_, size, socket);
    }
    ~MappedRing() {
        half_.reset();
        unmap();
    }
    MappedRing(const MappedRing&) = delete;
    MappedRing& operator=(const MappedRing&) = delete;

    // Null once it is closed.
    Half* half() noexcept { return half_ ? &*half_ : nullptr; }

    void init(const char* nonce) {
        auto* control = new (memory_) RingControl;
        std::memcpy(control->nonce, nonce, sizeof control->nonce);
        control->size = size_;
    }

    std::size_t size() const noexcept { return size_; }
    bool accepted() const noexcept { return half_ && control().accepted.load(std::memory_order_acquire) != 0; }

    // True if the memory is the one that was offered; says so to the other side.
    bool accept(const char* nonce) noexcept {
        unsigned difference = control().size != size_;
        for (std::size_t i = 0; i < sizeof control().nonce; ++i)  // to the end, wherever they differ
            difference |= static_cast<unsigned>(control().nonce[i] ^ static_cast<std::uint8_t>(nonce[i]));
        if (difference == 0) control().accepted.store(1, std::memory_order_release);
        return difference == 0;
    }

    bool resting = false;  // of the reading side: the next byte begins a frame
    Loans loans;           // of long messages

    void close() noexcept {
        if (half_) half_->leave();
        abandon();
    }

    // Without a word to the other side: for a forked child.
    void abandon() noexcept {
        closing_ = true;
        if (inside_ != 0) return;
        half_.reset();
        unmap();
    }

    void sever() noexcept {
        if (half_) half_->sever();
    }

    // Of a call that uses the memory; made and destroyed with the GIL held.
    class Stay {
    public:
        explicit Stay(MappedRing& ring) noexcept : ring_(ring) { ++ring_.inside_; }
        ~Stay() {
            if (--ring_.inside_ == 0 && ring_.closing_) ring_.abandon();
        }
        Stay(const Stay&) = delete;
        Stay& operator=(const Stay&) = delete;

    private:
        MappedRing& ring_;
    };

private:
    [[noreturn]] static void raise_errno() {
        PyErr_SetFromErrno(PyExc_OSError);
        throw nanobind::python_error();
    }

    RingControl& control() const noexcept { return *static_cast<RingControl*>(memory_); }
    std::size_t bytes() const noexcept { return ring_control_bytes + size_; }
    void unmap() noexcept {
        if (memory_ != nullptr) munmap(memory_, bytes());
        memory_ = nullptr;
    }

    void* memory_ = nullptr;
    std::size_t size_;
    std::optional<Half> half_;
    int inside_ = 0;
    bool closing_ = false;
};

using RingOut = MappedRing<RingWriter, MessageLender>;
using RingIn = MappedRing<RingReader, MessageBorrower>;

}  // namespace phalanx
