// A mapped segment as Python holds it: shared by the group, its quick path, and the arrays of `Group.empty`.
#pragma once

#include <nanobind/nanobind.h>
#include <sys/mman.h>

#include <memory>
#include <mutex>

#include "phalanx/collectives.hpp"
#include "phalanx/heap.hpp"

namespace phalanx {

class Mapping {
public:
    Mapping(int fd, std::size_t bytes) : bytes_(bytes) {
        void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        if (at == MAP_FAILED) {
            PyErr_SetFromErrno(PyExc_OSError);
            throw nanobind::python_error();
        }
        at_ = static_cast<std::byte*>(at);
    }
    ~Mapping() { munmap(at_, bytes_); }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    std::byte* at() const noexcept { return at_; }

private:
    std::byte* at_ = nullptr;
    std::size_t bytes_;
};

// The memory and this rank's heap in it; lives as long as the last array.
class SharedMemory {
public:
    SharedMemory(int fd, const Layout& layout) : mapping_(fd, layout.bytes()), heap_(layout.heap_bytes) {}

    std::byte* at() const noexcept { return mapping_.at(); }

    std::optional<std::size_t> take(std::size_t bytes) {
        const std::lock_guard guard(lock_);
        return heap_.take(bytes);
    }

    // Also gives the pages back to the machine.
    void give_back(std::byte* heap, std::size_t start, std::size_t bytes) {
        madvise(heap + start, bytes, MADV_REMOVE);
        const std::lock_guard guard(lock_);
        heap_.give_back(start, bytes);
    }

private:
    Mapping mapping_;
    std::mutex lock_;
    Heap heap_;
};

class SharedSegment {
public:
    SharedSegment(int fd, int rank, const Layout& layout, const Patience& patience)
        : memory(std::make_shared<SharedMemory>(fd, layout)),
          segment(memory->at(), layout, rank, patience),
          ops(segment) {}

    std::shared_ptr<SharedMemory> memory;
    Segment segment;
    Collectives ops;
};

}  // namespace phalanx
