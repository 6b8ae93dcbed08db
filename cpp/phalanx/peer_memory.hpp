// The memory of other processes, read where it lies: one copy instead of two through shared memory (Linux,
// process_vm_readv).
//
// The number of a process does not say whose memory that is. The process may have ended since and its number be another's
// by now, it may run another program, or the number may come from another pid namespace. So each process keeps random bytes
// at an address that it has told the others: its proof. Every read takes them along in the same call, for which the kernel
// holds on to the memory of one program. What came with other bytes is not used. A forked child has no proof.
//
// Nothing here fails for good: whatever the kernel refuses (another user, Yama, seccomp, pages that nobody else may read, a
// process that has ended), a read returns false, and the caller takes another way.
#pragma once

#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "jitter.hpp"

namespace phalanx {

using Proof = std::array<std::byte, 16>;

// This process's own, on a page of its own, so that a forked child finds zeros there. Gone with the group.
class OwnProof {
public:
    OwnProof() : page_(mmap(nullptr, page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
        if (page_ == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_WIPEONFORK
        madvise(page_, page_bytes, MADV_WIPEONFORK);
#endif
    }
    ~OwnProof() { munmap(page_, page_bytes); }
    OwnProof(const OwnProof&) = delete;
    OwnProof& operator=(const OwnProof&) = delete;

    // Where it lies from now on.
    std::uint64_t set(const Proof& proof) noexcept {
        std::memcpy(page_, proof.data(), proof.size());
        return reinterpret_cast<std::uintptr_t>(page_);
    }
    // Nobody can read this process's memory any more.
    void erase() noexcept { set(Proof{}); }

private:
    static constexpr std::size_t page_bytes = 4096;
    void* page_;
};

struct Peer {
    pid_t pid = 0;
    std::uint64_t proof_at = 0;
    Proof proof{};
};

class PeerMemory {
public:
    // By rank, this one among them. True if the proof of each can be read.
    bool open(std::vector<Peer> peers) {
        peers_ = std::move(peers);
        return std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return read(peer, nullptr, 0, 0); });
    }

    // True if all of it was read, and was that rank's. Otherwise what lies at `to` may be anything. Asks `over()` before every
    // piece whether to stop.
    template <class Over>
    bool read(int rank, std::byte* to, std::uint64_t from, std::size_t bytes, Over over) const noexcept {
        for (std::size_t done = 0; done < bytes; done += piece)
            if (over() || !read(peers_[static_cast<std::size_t>(rank)], to + done, from + done, std::min(piece, bytes - done)))
                return false;
        return true;
    }

private:
    static constexpr std::size_t piece = 8 << 20;  // a millisecond or two

    static bool read(const Peer& peer, std::byte* to, std::uint64_t from, std::size_t bytes) noexcept {
        jitter::step();
        Proof found;
        const auto there = [](std::uint64_t address) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)); };
        const iovec here_parts[] = {{to, bytes}, {found.data(), found.size()}};
        const iovec there_parts[] = {{there(from), bytes}, {there(peer.proof_at), found.size()}};
        const ssize_t count = process_vm_readv(peer.pid, here_parts, 2, there_parts, 2, 0);
        jitter::step();
        return count == static_cast<ssize_t>(bytes + found.size()) && found == peer.proof;
    }

    std::vector<Peer> peers_;
};

}  // namespace phalanx
