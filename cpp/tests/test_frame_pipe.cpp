// The pipe of remote calls alone, without Python: two threads as its ends. Run by `make sanitize`.

#include "phalanx/frame_pipe.hpp"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"

using namespace phalanx;

namespace {

constexpr std::size_t read_ahead = 4096;
constexpr std::size_t ring_size = 8192;

// A connection, with or without rings.
struct Connection {
    explicit Connection(bool with_rings) : with_rings(with_rings) {
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0) std::abort();
        for (void*& ring : memory) {
            ring = mmap(nullptr, ring_control_bytes + ring_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
            if (ring == MAP_FAILED) std::abort();
            new (ring) RingControl;
        }
    }
    ~Connection() {
        for (void* ring : memory) munmap(ring, ring_control_bytes + ring_size);
        for (const int socket : sockets) close(socket);
    }
    bool with_rings;
    int sockets[2];
    void* memory[2];
};

// One end: what the bindings do around a pipe.
struct End {
    End(Connection& connection, int side)
        : pipe(connection.sockets[side], read_ahead),
          socket(connection.sockets[side]),
          in(connection.memory[1 - side], ring_size, socket),
          out(connection.memory[side], ring_size, socket),
          rings(connection.with_rings ? FramePipe::Rings{&in, &out} : FramePipe::Rings{}) {}

    void wait(short events) {
        pollfd polled{socket, static_cast<short>(rings.in != nullptr ? POLLIN : events), 0};
        if (::poll(&polled, 1, 20'000) == 1 && (polled.revents & POLLIN) != 0) pipe.woken(rings);
    }

    FramePipe pipe;
    int socket;
    RingReader in;
    RingWriter out;
    FramePipe::Rings rings;
};

char byte_at(std::size_t i, unsigned seed) { return static_cast<char>(i * 31 + seed * 7 + (i >> 8)); }

std::vector<char> pattern(std::size_t size, unsigned seed) {
    std::vector<char> made(size);
    for (std::size_t i = 0; i < size; ++i) made[i] = byte_at(i, seed);
    return made;
}

struct Sizes {
    std::size_t head;
    std::size_t payload;
};

// Frames of random sizes, the same on both sides; some heads do not fit into the buffer.
std::vector<Sizes> frames(int count) {
    std::mt19937 random(7);
    std::vector<Sizes> made;
    for (int i = 0; i < count; ++i) {
        const std::size_t head = random() % (i % 13 == 0 ? 3 * read_ahead : 120);
        made.push_back({head, random() % 3 == 0 ? random() % 40'000 : 0});
    }
    return made;
}

void send_frames(End& end, const std::vector<Sizes>& all, std::int64_t patience) {
    unsigned seed = 0;
    for (const Sizes& sizes : all) {
        CallHeader header{{'P', 'C'}, 1, 0, static_cast<std::uint32_t>(sizes.head), seed, sizes.payload};
        auto head = pattern(sizes.head, seed);
        auto payload = pattern(sizes.payload, seed + 1);
        std::vector<char> whole(reinterpret_cast<char*>(&header), reinterpret_cast<char*>(&header) + sizeof header);
        whole.insert(whole.end(), head.begin(), head.end());
        whole.insert(whole.end(), payload.begin(), payload.end());
        for (std::size_t done = 0; done < whole.size();) {
            iovec parts[] = {{whole.data() + done, std::min<std::size_t>(7, whole.size() - done)},
                             {whole.data() + std::min(done + 7, whole.size()), whole.size() - std::min(done + 7, whole.size())}};
            const std::size_t count = end.pipe.send(end.rings, parts, patience);
            done += count;
            if (end.pipe.ended() != 0) return;
            if (count == 0) end.wait(POLLOUT);
        }
        ++seed;
    }
}

bool take(End& end, char* to, std::size_t size) {
    for (std::size_t done = 0; done < size;) {
        const std::size_t count = end.pipe.fill(end.rings, to + done, size - done, 1000);
        done += count;
        if (count == 0 && end.pipe.ended() != 0) return false;
        if (count == 0 && end.pipe.may_sleep(end.rings)) end.wait(POLLIN);
    }
    return true;
}

void receive_frames(End& end, const std::vector<Sizes>& all, std::int64_t look) {
    unsigned seed = 0;
    while (seed < all.size()) {
        bool whole = false;
        const CallHeader* found = end.pipe.front(whole);
        const bool is_long = found != nullptr && !end.pipe.fits(found->head);
        if (found == nullptr || (!whole && !is_long)) {
            if (!end.pipe.receive(end.rings, look) && end.pipe.may_sleep(end.rings)) end.wait(POLLIN);
            if (end.pipe.ended() != 0) break;
            continue;
        }
        const CallHeader header = *found;
        CHECK(header.magic[0] == 'P' && header.call == seed && header.head == all[seed].head);
        CHECK(header.payload == all[seed].payload);
        std::vector<char> head(header.head);
        if (whole) {
            std::copy_n(end.pipe.head(), header.head, head.data());
            end.pipe.skip(sizeof header + header.head);
        } else {
            end.pipe.skip(sizeof header);
            CHECK(take(end, head.data(), head.size()));
        }
        std::vector<char> payload(header.payload);
        CHECK(take(end, payload.data(), payload.size()));
        CHECK(head == pattern(header.head, seed));
        CHECK(payload == pattern(header.payload, seed + 1));
        ++seed;
    }
    CHECK(seed == all.size());
}

void both_ways() {
    const auto all = frames(400);
    for (const bool with_rings : {false, true}) {
        for (const std::int64_t patience : {0, 20'000}) {
            Connection connection(with_rings);
            End mine(connection, 0);
            End other(connection, 1);
            std::thread sender([&] { send_frames(mine, all, patience); });
            receive_frames(other, all, patience);
            sender.join();
            std::thread back([&] { send_frames(other, all, patience); });
            receive_frames(mine, all, patience);
            back.join();
        }
    }
}

void an_end_is_seen_after_what_came_before() {
    for (const bool with_rings : {false, true}) {
        Connection connection(with_rings);
        End mine(connection, 0);
        End other(connection, 1);
        const std::vector<Sizes> one{{10, 100}};
        send_frames(mine, one, 0);
        shutdown(connection.sockets[0], SHUT_RDWR);
        receive_frames(other, one, 0);
        for (int i = 0; i < 10 && other.pipe.ended() == 0; ++i) {
            if (!other.pipe.receive(other.rings, 0) && other.pipe.may_sleep(other.rings)) other.wait(POLLIN);
        }
        CHECK(other.pipe.ended() == pipe_closed);
    }
}

void what_comes_beside_rings_is_refused() {
    Connection connection(true);
    End mine(connection, 0);
    const char bytes[] = {0, 0, 'x', 0};
    CHECK(::send(connection.sockets[1], bytes, sizeof bytes, 0) == sizeof bytes);
    CHECK(mine.pipe.may_sleep(mine.rings));
    mine.wait(POLLIN);
    CHECK(mine.pipe.ended() == pipe_beside);
}

void nonsense_in_the_counters_is_refused() {
    Connection connection(true);
    End mine(connection, 0);
    mine.in.control().written.bytes.store(1 << 30);
    CHECK(!mine.pipe.receive(mine.rings, 0));
    CHECK(mine.pipe.ended() == pipe_broken);
}

void a_severed_ring_ends_both() {
    Connection connection(true);
    End mine(connection, 0);
    End other(connection, 1);
    mine.out.sever();
    CHECK(!other.pipe.receive(other.rings, 0));
    CHECK(other.pipe.ended() == pipe_severed);
    char byte = 'x';
    iovec parts[] = {{&byte, 1}};
    mine.pipe.send(mine.rings, parts, 0);
    CHECK(mine.pipe.ended() == pipe_severed);
}

}  // namespace

int main() {
    both_ways();
    an_end_is_seen_after_what_came_before();
    what_comes_beside_rings_is_refused();
    nonsense_in_the_counters_is_refused();
    a_severed_ring_ends_both();
    std::printf("%d checks, %d failed\n", checks.load(), failures.load());
    return failures.load() == 0 ? 0 : 1;
}
