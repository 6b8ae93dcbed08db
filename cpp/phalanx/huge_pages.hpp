// Shared memory in huge pages: a processor remembers where a few hundred pages lie, whatever their size, and who comes to
// small ones for the first time asks the kernel 512 times as often.
//
// What the administrator has set for shared memory (mostly "never") does not hold for pages that are put together on
// demand. Linux does that from 6.1 on; where it does not, or finds no room, the pages stay small.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace phalanx {

inline constexpr std::size_t huge_page = 2 << 20;

// Puts each huge page that lies wholly in these bytes together, with what it contains. Best done before anything is there:
// that takes less time than the small pages would, which come one by one.
inline void put_huge_pages_together(std::byte* first, std::size_t bytes) noexcept {
#ifdef MADV_COLLAPSE
    constexpr int collapse = MADV_COLLAPSE;
#else
    constexpr int collapse = 25;  // the headers are older than the kernel may be
#endif
    const auto begin = (reinterpret_cast<std::uintptr_t>(first) + huge_page - 1) / huge_page * huge_page;
    const auto end = (reinterpret_cast<std::uintptr_t>(first) + bytes) / huge_page * huge_page;
    if (begin >= end) return;
    for (auto at = begin; at < end; at += huge_page)  // where there is no page at all, there is nothing to put together
        static_cast<void>(*reinterpret_cast<const volatile unsigned char*>(at));
    madvise(reinterpret_cast<void*>(begin), end - begin, collapse);
}

}  // namespace phalanx
