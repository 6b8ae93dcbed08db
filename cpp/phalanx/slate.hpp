// The slate of a rank: a small file in shared memory that says what the rank does and did, for other processes to read while it
// hangs and after it has crashed. phalanx/slate/layout.py is the same table for Python.
//
// One thread writes at a time (the GIL sees to that), and nobody waits for a reader. A record holds its own number while it is
// whole: the writer clears it long before, with the record that comes before it, and sets it last; a reader that finds the same
// number before and after its copy has the record. Counters are single words.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "jitter.hpp"

namespace phalanx::slate {

inline constexpr std::size_t records = 2048;
inline constexpr std::size_t sites = 256;
inline constexpr std::size_t groups = 64;
inline constexpr std::size_t text_bytes = 64 << 10;

struct Record {
    Shared<std::int64_t> began_ns;
    Shared<std::int64_t> ended_ns;  // 0 while it runs; its negative if it failed
    Shared<std::uint64_t> sequence; // of a collective; 0 for a message
    Shared<std::uint64_t> bytes;
    Shared<std::uint32_t> group;
    Shared<std::uint32_t> site;
    Shared<std::int32_t> peer;  // the root, the destination or the source; -1 where there is none
    Shared<std::uint32_t> starved_us;  // since the operation before: ready to run, and without a processor
    Shared<std::uint64_t> fingerprint;
    Shared<std::uint64_t> number;  // from 1; 0 while it is written
};
static_assert(sizeof(Record) == 64);

// A verb at a line of the program.
struct Site {
    Shared<std::uint32_t> text, length;  // verb, file, function and line, with zero bytes between them
    Shared<std::uint64_t> count, bytes;
    Shared<std::int64_t> total_ns, longest_ns;
    std::uint64_t unused[3];
};
static_assert(sizeof(Site) == 64);

// Python writes the rest of it: who the members are.
struct Group {
    std::uint64_t id;
    Shared<std::uint64_t> sequence;  // of the collective that was begun last, and its fingerprint
    Shared<std::uint64_t> fingerprint;
    std::uint64_t members[5];
};
static_assert(sizeof(Group) == 64);

// Where the parts begin. What lies between the groups and the text Python alone writes.
inline constexpr std::size_t count_at = 128;  // in the header: records begun, then sites and bytes of text
inline constexpr std::size_t records_at = 4096;
inline constexpr std::size_t sites_at = records_at + records * sizeof(Record);
inline constexpr std::size_t groups_at = sites_at + sites * sizeof(Site);
inline constexpr std::size_t text_at = groups_at + groups * sizeof(Group) + (4 << 10) + (8 << 10) + (16 << 10);
inline constexpr std::size_t bytes = text_at + text_bytes;

// What was stored before is seen before what is stored after. A fence of C++ has to wait for loads as well, which takes an ARM
// processor longer than all the rest of a record.
inline void order_stores() noexcept {
#if defined(__aarch64__)
    __asm__ volatile("dmb ishst" ::: "memory");
#else
    std::atomic_thread_fence(std::memory_order_release);
#endif
}

class Writer {
public:
    explicit Writer(std::byte* base) noexcept : base_(base) {}

    // Its number, for `end`.
    std::uint64_t begin(std::uint32_t group, std::uint32_t site, std::int32_t peer, std::uint64_t size, std::uint64_t sequence,
                        std::uint64_t fingerprint, std::uint32_t starved_us, std::int64_t now) noexcept {
        const std::uint64_t number = ++count_;
        Record& record = record_of(number);
        record.began_ns.store(now, std::memory_order_relaxed);
        record.ended_ns.store(0, std::memory_order_relaxed);
        record.sequence.store(sequence, std::memory_order_relaxed);
        record.bytes.store(size, std::memory_order_relaxed);
        record.group.store(group, std::memory_order_relaxed);
        record.site.store(site, std::memory_order_relaxed);
        record.peer.store(peer, std::memory_order_relaxed);
        record.starved_us.store(starved_us, std::memory_order_relaxed);
        record.fingerprint.store(fingerprint, std::memory_order_relaxed);
        Group& mine = group_of(group);
        if (sequence != 0) mine.fingerprint.store(fingerprint, std::memory_order_relaxed);
        record_of(number + 1).number.store(0, std::memory_order_relaxed);
        order_stores();
        record.number.store(number, std::memory_order_relaxed);
        word<std::uint64_t>(count_at).store(number, std::memory_order_relaxed);
        if (sequence != 0) mine.sequence.store(sequence, std::memory_order_relaxed);
        return number;
    }

    void end(std::uint64_t number, std::uint32_t site, std::uint64_t size, std::int64_t began, std::int64_t now,
             bool failed) noexcept {
        Record& record = record_of(number);
        if (record.number.load(std::memory_order_relaxed) == number) record.ended_ns.store(failed ? -now : now, std::memory_order_relaxed);
        Site& at = site_of(site);
        add<std::uint64_t>(at.count, 1);
        add(at.bytes, size);
        add(at.total_ns, now - began);
        if (now - began > at.longest_ns.load(std::memory_order_relaxed)) at.longest_ns.store(now - began, std::memory_order_relaxed);
    }

    // 0, which stands for all that there is no room for, if the table is full.
    std::uint32_t add_site(std::string_view text) noexcept {
        const auto next = site_count().load(std::memory_order_relaxed);
        std::uint32_t at = 0;
        if (next >= sites || !add_text(text, at)) return 0;
        Site& site = site_of(next);
        site.text.store(at, std::memory_order_relaxed);
        site.length.store(static_cast<std::uint32_t>(text.size()), std::memory_order_relaxed);
        site_count().store(next + 1, std::memory_order_release);
        return next;
    }

private:
    template <class T>
    Shared<T>& word(std::size_t at) const noexcept {
        return *reinterpret_cast<Shared<T>*>(base_ + at);
    }

    // By the only writer: no other thread can come in between.
    template <class T>
    static void add(Shared<T>& word, T value) noexcept {
        word.store(word.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
    }

    Shared<std::uint32_t>& site_count() const noexcept { return word<std::uint32_t>(count_at + 8); }
    Shared<std::uint32_t>& text_count() const noexcept { return word<std::uint32_t>(count_at + 12); }

    Record& record_of(std::uint64_t number) const noexcept {
        return reinterpret_cast<Record*>(base_ + records_at)[number % records];
    }
    Site& site_of(std::uint32_t index) const noexcept { return reinterpret_cast<Site*>(base_ + sites_at)[index]; }
    Group& group_of(std::uint32_t index) const noexcept { return reinterpret_cast<Group*>(base_ + groups_at)[index]; }

    bool add_text(std::string_view text, std::uint32_t& at) noexcept {
        at = text_count().load(std::memory_order_relaxed);
        if (at + text.size() > text_bytes) return false;
        std::memcpy(base_ + text_at + at, text.data(), text.size());
        text_count().store(at + static_cast<std::uint32_t>(text.size()), std::memory_order_release);
        return true;
    }

    std::byte* base_;
    std::uint64_t count_ = 0;
};

}  // namespace phalanx::slate
