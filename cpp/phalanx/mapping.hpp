// Memory that this process shares with others, and how it stops sharing: parts of it for good, and all of it in a child.
//
// A forked child inherits the mapping, but has no part in what goes on there. So it gets private pages in its place, at
// the same addresses: what it writes or gives back stays its own.
#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

#include "huge_pages.hpp"

namespace phalanx {

class Mapping {
public:
    // Throws std::system_error if the memory cannot be mapped. The descriptor stays the caller's.
    Mapping(int fd, std::size_t bytes) : bytes_(bytes), fd_(fcntl(fd, F_DUPFD_CLOEXEC, 0)) {
        if (fd_ < 0) throw std::system_error(errno, std::generic_category());
        void* at = map(fd_, bytes);
        if (at == MAP_FAILED) {
            const int error = errno;
            ::close(fd_);
            throw std::system_error(error, std::generic_category());
        }
        at_ = static_cast<std::byte*>(at);
        const std::lock_guard guard(registry().lock);
        registry().mappings.push_back(this);
    }
    ~Mapping() {
        {
            const std::lock_guard guard(registry().lock);
            std::erase(registry().mappings, this);
        }
        munmap(at_, bytes_);
        if (fd_ >= 0) ::close(fd_);
    }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    std::byte* at() const noexcept { return at_; }

    // Nobody in this process needs what lies here any more, though it stays mapped: a child need not see it.
    void forget() noexcept {
        const std::lock_guard guard(registry().lock);
        if (fd_ >= 0) ::close(fd_);
        fd_ = -1;
    }

    // Puts private pages in the place of those that hold these bytes; what they contain stays. False if there is no memory
    // for it. Only for bytes that no other thread of this process writes meanwhile.
    bool detach(std::byte* first, std::size_t bytes) {
        if (bytes == 0) return true;
        const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        const std::size_t start = static_cast<std::size_t>(first - at_) / page * page;
        const std::size_t end = std::min(bytes_, (static_cast<std::size_t>(first - at_) + bytes + page - 1) / page * page);
        const std::size_t length = end - start;
        const std::lock_guard guard(registry().lock);
        if (private_) return true;
        detached_.reserve(detached_.size() + 1);
        void* copy = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (copy == MAP_FAILED) return false;
        std::memcpy(copy, at_ + start, length);
        if (mremap(copy, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, at_ + start) == MAP_FAILED) {
            munmap(copy, length);
            return false;
        }
        detached_.emplace_back(start, end);
        std::sort(detached_.begin(), detached_.end());
        return true;
    }

    // Gives whole pages back to the machine, for everybody who shares them. False if not all of them are shared any more:
    // then they cannot be shared again.
    bool release(std::byte* first, std::size_t bytes) noexcept {
        const std::lock_guard guard(registry().lock);
        const auto start = static_cast<std::size_t>(first - at_);
        const bool shared = !private_ && std::none_of(detached_.begin(), detached_.end(), [&](const auto& part) {
            return part.first < start + bytes && start < part.second;
        });
        madvise(first, bytes, shared ? MADV_REMOVE : MADV_DONTNEED);
        return shared;
    }

private:
    // Long memory begins with a huge page in every process: only so it can have them.
    static void* map(int fd, std::size_t bytes) noexcept {
        const int access = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_NORESERVE;
        if (bytes < huge_page) return mmap(nullptr, bytes, access, flags, fd, 0);
        void* room = mmap(nullptr, bytes + huge_page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (room == MAP_FAILED) return room;
        auto* first = static_cast<std::byte*>(room);
        const std::size_t before = (huge_page - reinterpret_cast<std::uintptr_t>(room) % huge_page) % huge_page;
        void* at = mmap(first + before, bytes, access, flags | MAP_FIXED, fd, 0);
        if (at == MAP_FAILED) {
            const int error = errno;
            munmap(room, bytes + huge_page);
            errno = error;
            return at;
        }
        const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        const std::size_t end = (before + bytes + page - 1) / page * page;
        if (before > 0) munmap(first, before);
        if (end < bytes + huge_page) munmap(first + end, bytes + huge_page - end);
        return at;
    }

    struct Registry {
        std::mutex lock;
        std::vector<Mapping*> mappings;

        Registry() {
            pthread_atfork([] { registry().lock.lock(); }, [] { registry().lock.unlock(); },
                           [] {
                               for (Mapping* mapping : registry().mappings) mapping->become_private();
                               registry().lock.unlock();
                           });
        }
    };

    // Lives for ever: the handlers of `pthread_atfork` cannot be taken back.
    static Registry& registry() {
        static auto* made = new Registry;
        return *made;
    }

    // In a forked child, before anything else runs there.
    void become_private() noexcept {
        if (private_) return;  // as it was in the parent
        std::size_t from = 0;
        for (const auto& [start, end] : detached_) {
            if (from < start) replace(from, start);
            from = std::max(from, end);
        }
        if (from < bytes_) replace(from, bytes_);
        if (fd_ >= 0) ::close(fd_);
        fd_ = -1;
        private_ = true;
    }

    void replace(std::size_t start, std::size_t end) noexcept {
        const int flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE | (fd_ < 0 ? MAP_ANONYMOUS : 0);
        void* at = mmap(at_ + start, end - start, PROT_READ | PROT_WRITE, flags, fd_,
                        fd_ < 0 ? 0 : static_cast<off_t>(start));
        if (at == MAP_FAILED) munmap(at_ + start, end - start);  // better that the child has nothing than that it disturbs
    }

    std::byte* at_ = nullptr;
    std::size_t bytes_;
    int fd_;                // what a child maps again; -1 once nobody needs it
    bool private_ = false;  // in a forked child
    std::vector<std::pair<std::size_t, std::size_t>> detached_;  // from where to where, sorted
};

}  // namespace phalanx
