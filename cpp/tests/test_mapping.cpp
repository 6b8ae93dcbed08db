// Shared memory that stops being shared: in a forked child, and where it was detached. Run by `make sanitize`.

#include <sys/wait.h>

#include <cstdio>
#include <thread>
#include <vector>

#include "check.hpp"
#include "phalanx/mapping.hpp"

using namespace phalanx;

namespace {

constexpr std::size_t page = 4096;
constexpr std::size_t pages = 8;

struct Memory {
    int fd = memfd_create("test", MFD_CLOEXEC);
    Memory() { CHECK(ftruncate(fd, pages * page) == 0); }
    ~Memory() { close(fd); }
};

void fill(std::byte* at, int value, std::size_t bytes) { std::memset(at, value, bytes); }

bool all(const std::byte* at, int value, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; ++i)
        if (at[i] != static_cast<std::byte>(value)) return false;
    return true;
}

// Runs in a child; true if it returned true there.
template <class F>
bool in_child(F body) {
    const pid_t child = fork();
    if (child == 0) _exit(body() ? 0 : 1);
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void a_child_has_pages_of_its_own() {
    Memory memory;
    Mapping mine(memory.fd, pages * page);
    Mapping theirs(memory.fd, pages * page);
    fill(mine.at(), 1, pages * page);
    CHECK(in_child([&] {
        bool good = all(mine.at(), 1, pages * page);
        fill(mine.at(), 9, 2 * page);
        good = good && all(mine.at(), 9, 2 * page) && all(theirs.at(), 1, pages * page);
        good = good && !mine.release(mine.at(), pages * page) && !theirs.release(theirs.at(), pages * page);
        good = good && mine.detach(mine.at(), page);
        return good && in_child([&] { return fill(mine.at(), 8, page), true; });  // and a child of its own
    }));
    CHECK(all(mine.at(), 1, pages * page));
    CHECK(all(theirs.at(), 1, pages * page));
}

void what_is_detached_is_out_of_reach() {
    Memory memory;
    Mapping mine(memory.fd, pages * page);
    Mapping theirs(memory.fd, pages * page);
    fill(mine.at(), 1, pages * page);
    CHECK(mine.detach(mine.at() + page + 100, page));  // two pages: it lies across a border
    CHECK(mine.detach(mine.at() + 5 * page, 1));
    CHECK(all(mine.at(), 1, pages * page));
    fill(theirs.at(), 2, pages * page);
    CHECK(all(mine.at(), 2, page));
    CHECK(all(mine.at() + page, 1, 2 * page));
    CHECK(all(mine.at() + 3 * page, 2, 2 * page));
    CHECK(all(mine.at() + 5 * page, 1, page));
    fill(mine.at() + page, 3, page);
    CHECK(all(theirs.at(), 2, pages * page));
    CHECK(in_child([&] {  // a child sees the same
        const bool good = all(mine.at() + page, 3, page) && all(mine.at() + 5 * page, 1, page) && all(mine.at(), 2, page);
        fill(mine.at(), 7, pages * page);
        return good;
    }));
    CHECK(all(theirs.at(), 2, pages * page));
    CHECK(!mine.release(mine.at(), 2 * page));  // a part of it is not shared any more
    CHECK(all(theirs.at(), 2, pages * page));
    CHECK(mine.release(mine.at() + 3 * page, page));
    CHECK(all(theirs.at() + 3 * page, 0, page));
    CHECK(all(theirs.at() + 4 * page, 2, page));
}

void long_memory_can_have_huge_pages() {
    constexpr std::size_t bytes = 2 * huge_page + 3 * page;
    const int fd = memfd_create("test", MFD_CLOEXEC);
    CHECK(ftruncate(fd, bytes) == 0);
    {
        Mapping mine(fd, bytes);
        Mapping theirs(fd, bytes);
        for (const Mapping* mapping : {&mine, &theirs}) CHECK(reinterpret_cast<std::uintptr_t>(mapping->at()) % huge_page == 0);
        fill(theirs.at() + page, 1, bytes - page);
        put_huge_pages_together(mine.at() + 1, bytes - 1);  // the second, with what it contains
        put_huge_pages_together(theirs.at(), huge_page - 1);  // none
        put_huge_pages_together(mine.at(), bytes);
        CHECK(all(mine.at(), 0, page));
        CHECK(all(mine.at() + page, 1, bytes - page));
        fill(mine.at() + huge_page, 2, huge_page);
        CHECK(all(theirs.at() + huge_page, 2, huge_page));
        CHECK(theirs.detach(theirs.at() + huge_page - page, 2 * page));
        fill(mine.at(), 3, bytes);
        CHECK(all(theirs.at() + huge_page - page, 1, page) && all(theirs.at() + huge_page, 2, page));
        CHECK(in_child([&] { return fill(mine.at(), 4, bytes), put_huge_pages_together(mine.at(), bytes), true; }));
        CHECK(all(mine.at(), 3, bytes));
        CHECK(mine.release(mine.at() + page, huge_page));
        CHECK(all(mine.at(), 3, page) && all(mine.at() + page, 0, huge_page));
    }
    close(fd);
}

void forks_beside_other_threads() {
#if !defined(__SANITIZE_THREAD__)  // which takes the parent's threads for leaks of the child
    Memory memory;
    std::vector<std::thread> threads;
    for (int t = 0; t < 2; ++t)
        threads.emplace_back([&] {
            for (int i = 0; i < 50; ++i) {
                Mapping mine(memory.fd, pages * page);
                CHECK(mine.detach(mine.at() + page, page));
            }
        });
    for (int i = 0; i < 10; ++i) CHECK(in_child([] { return true; }));
    for (auto& thread : threads) thread.join();
#endif
}

}  // namespace

int main() {
    a_child_has_pages_of_its_own();
    what_is_detached_is_out_of_reach();
    long_memory_can_have_huge_pages();
    forks_beside_other_threads();
    std::printf("%d checks, %d failed\n", checks.load(), failures.load());
    return failures == 0 ? 0 : 1;
}
