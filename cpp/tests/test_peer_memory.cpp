// Memory of other processes: what can be read, and what is never taken for theirs. Run by `make sanitize`.

#include "phalanx/peer_memory.hpp"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <functional>

#include "check.hpp"

using namespace phalanx;

namespace {

constexpr std::size_t page = 4096;
constexpr std::size_t bytes = 20 << 20;  // several pieces

Proof proof_of(int value) {
    Proof proof;
    proof.fill(static_cast<std::byte>(value));
    return proof;
}

const auto going_on = [] { return false; };

std::uint64_t address(const void* at) { return reinterpret_cast<std::uintptr_t>(at); }

// Private memory of so many bytes, all of one value.
std::byte* filled(int value) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    std::memset(at, value, bytes);
    return static_cast<std::byte*>(at);
}

bool all(const std::byte* at, int value, std::size_t count) {
    return std::all_of(at, at + count, [&](std::byte found) { return found == static_cast<std::byte>(value); });
}

// Another process: does something, says where its proof lies, and waits until it is killed.
class Other {
public:
    explicit Other(const std::function<std::uint64_t()>& begin) {
        int ends[2];
        CHECK(pipe(ends) == 0);
        pid_ = fork();
        if (pid_ == 0) {
            const std::uint64_t at = begin();
            if (write(ends[1], &at, sizeof(at)) != sizeof(at)) _exit(1);
            for (;;) pause();
        }
        CHECK(read(ends[0], &proof_at_, sizeof(proof_at_)) == sizeof(proof_at_));
        close(ends[0]);
        close(ends[1]);
    }
    ~Other() { end(); }

    void end() {
        if (pid_ == 0) return;
        kill(pid_, SIGKILL);
        waitpid(pid_, nullptr, 0);
        pid_ = 0;
    }
    Peer peer(const Proof& proof) const { return {pid_, proof_at_, proof}; }

private:
    pid_t pid_ = 0;
    std::uint64_t proof_at_ = 0;
};

void what_another_process_has() {
    std::byte* theirs = filled(1);
    std::byte* mine = filled(2);
    Other other([&] {
        std::memset(theirs, 3, bytes);  // its own copy, at the same address
        munmap(theirs + 12 * page, page);
        munmap(theirs + bytes - page, page);
        return (new OwnProof)->set(proof_of(7));
    });
    PeerMemory memory;
    CHECK(memory.open({other.peer(proof_of(7))}));
    CHECK(memory.read(0, mine, address(theirs), 12 * page, going_on));
    CHECK(all(mine, 3, 12 * page) && all(mine + 12 * page, 2, page));
    const std::size_t after = 13 * page;  // up to the page at the end, in several pieces
    CHECK(memory.read(0, mine, address(theirs) + after, bytes - after - page, going_on));
    CHECK(all(mine, 3, bytes - after - page));
    CHECK(memory.read(0, mine, 0, 0, going_on));

    CHECK(!memory.read(0, mine, address(theirs), after, going_on));              // its end is not there
    CHECK(!memory.read(0, mine, address(theirs) + after, bytes - after, going_on));  // in the last piece only
    CHECK(!memory.read(0, mine, address(theirs) + 12 * page, page, going_on));
    CHECK(!memory.read(0, mine, ~std::uint64_t{0} - page, 2 * page, going_on));  // nor can it be
    CHECK(!memory.read(0, mine, address(theirs), page, [] { return true; }));
    CHECK(!PeerMemory().open({other.peer(proof_of(8))}));

    Peer gone = other.peer(proof_of(7));
    other.end();
    CHECK(!memory.read(0, mine, address(theirs), page, going_on));
    CHECK(!PeerMemory().open({gone}));
    munmap(theirs, bytes);
    munmap(mine, bytes);
}

// Its number may be that of another process by now. The nearest to that is a child of it: the same program, memory, addresses.
void a_process_in_its_place() {
    std::byte* theirs = filled(1);
    std::byte* mine = filled(2);
    OwnProof proof;
    const std::uint64_t at = proof.set(proof_of(5));
    PeerMemory memory;
    CHECK(memory.open({{getpid(), at, proof_of(5)}}));  // this process itself
    CHECK(memory.read(0, mine, address(theirs), page, going_on) && all(mine, 1, page));
    const Other child([&] { return at; });
    CHECK(!PeerMemory().open({child.peer(proof_of(5))}));
    PeerMemory wrong;
    CHECK(!wrong.open({child.peer(proof_of(5))}));
    CHECK(!wrong.read(0, mine, address(theirs), page, going_on));
    CHECK(memory.open({{getpid(), at, proof_of(5)}}));  // where it still is
    proof.erase();
    CHECK(!memory.read(0, mine, address(theirs), page, going_on));
    munmap(theirs, bytes);
    munmap(mine, bytes);
}

}  // namespace

int main() {
    what_another_process_has();
    a_process_in_its_place();
    std::printf("%d checks, %d failed\n", checks.load(), failures.load());
    return failures == 0 ? 0 : 1;
}
