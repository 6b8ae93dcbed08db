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
    End(Connection& connection, int side, const FramePipe::Lending& lending = {})
        : pipe(connection.sockets[side], read_ahead, lending),
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

// -- loans --

constexpr std::int64_t second = 1'000'000'000;
constexpr std::size_t long_array = 600'001;
constexpr std::size_t short_array = 999;

// A frame of a long array, a short one, and a long one. Returns what was left to be sent through the ring.
std::size_t send_loan(End& end, const std::vector<char>& payload, std::int64_t lend_for) {
    CallHeader header{{'P', 'C'}, 1, 0, 3, 17, payload.size()};
    char head[] = {'a', 'b', 'c'};
    auto* bytes = const_cast<char*>(payload.data());
    std::vector<iovec> parts{{&header, sizeof header}, {head, sizeof head}, {bytes, long_array}};
    parts.push_back({bytes + long_array, short_array});
    parts.push_back({bytes + long_array + short_array, payload.size() - long_array - short_array});
    CHECK(end.pipe.may_lend(end.rings, sizeof head));
    const std::size_t before = sizeof header + sizeof head;
    std::size_t done = end.pipe.send_lent(end.rings, header, parts, 1000, 0, lend_for) - before;
    const std::size_t left = payload.size() - done;
    while (done < payload.size() && end.pipe.ended() == 0) {
        iovec rest[] = {{bytes + done, payload.size() - done}};
        const std::size_t count = end.pipe.send(end.rings, rest, 1000);
        done += count;
        if (count == 0) end.wait(POLLOUT);
    }
    return left;
}

void receive_loan(End& end, const std::vector<char>& payload) {
    bool whole = false;
    while (end.pipe.front(whole) == nullptr || !whole)
        if (!end.pipe.receive(end.rings, 1000) && end.pipe.may_sleep(end.rings)) end.wait(POLLIN);
    const CallHeader header = *end.pipe.front(whole);
    CHECK(header.kind == (1 | in_parts) && header.payload == payload.size());
    end.pipe.skip(sizeof header + header.head);
    end.pipe.begin_parts(header.payload);
    std::vector<char> found(payload.size());
    for (std::size_t done = 0; done < found.size();) {  // in pieces, as the bindings do
        const std::size_t piece = std::min<std::size_t>(200'000, found.size() - done);
        CHECK(take(end, found.data() + done, piece));
        done += piece;
    }
    CHECK(found == payload);
}

void loans() {
    const auto payload = pattern(3 * long_array, 5);
    for (const int helpers : {0, 2}) {
        Connection connection(true);
        SharedCrew crew(2);
        const FramePipe::Lending lending{.pid = getpid(), .crew = &crew, .helpers = helpers, .lends = true};
        End mine(connection, 0, lending);
        End other(connection, 1, lending);
        for (int i = 0; i < 20; ++i) {
            std::size_t left = 0;
            std::thread sender([&] { left = send_loan(mine, payload, 20 * second); });
            receive_loan(other, payload);
            sender.join();
            CHECK(left == 0);
            CHECK(other.pipe.may_sleep(other.rings));
        }
        CHECK(mine.pipe.lent() == 20 * (payload.size() - short_array));
    }
}

// A receiver that is slow: the sender takes its memory back at any time, and changes it.
void loans_that_are_taken_back() {
    const auto payload = pattern(3 * long_array, 6);
    for (std::int64_t lend_for = 0; lend_for < 200'000; lend_for += 5'000) {
        Connection connection(true);
        const FramePipe::Lending lending{.pid = getpid(), .crew = nullptr, .helpers = 0, .lends = true};
        End mine(connection, 0, lending);
        End other(connection, 1, lending);
        std::thread sender([&] {
            for (int i = 0; i < 3; ++i) {
                auto copy = payload;
                send_loan(mine, copy, lend_for);
                std::fill(copy.begin(), copy.end(), 'x');
            }
        });
        for (int i = 0; i < 3; ++i) receive_loan(other, payload);
        sender.join();
    }
}

// Another process than the one that lends: what is read there is not used.
void loans_that_are_refused() {
    const auto payload = pattern(3 * long_array, 7);
    Connection connection(true);
    const FramePipe::Lending lending{.pid = getppid(), .crew = nullptr, .helpers = 0, .lends = true};
    End mine(connection, 0, lending);
    End other(connection, 1, lending);
    std::thread sender([&] { send_loan(mine, payload, 20 * second); });
    receive_loan(other, payload);
    sender.join();
    CHECK(mine.pipe.lent() == 0);
    CHECK(!mine.pipe.may_lend(mine.rings, 3));
}

void nonsense_in_a_part_is_refused() {
    for (const PayloadPart part : {PayloadPart{2, 1, 10, 0, 0, {}}, PayloadPart{0, 1, 11, 0, 0, {}}, PayloadPart{1, 1, 0, 0, 0, {}}}) {
        Connection connection(true);
        End mine(connection, 0);
        End other(connection, 1);
        iovec parts[] = {{const_cast<PayloadPart*>(&part), sizeof part}};
        CHECK(mine.pipe.send(mine.rings, parts, 0) == sizeof part);
        other.pipe.begin_parts(10);
        char found[10];
        CHECK(other.pipe.fill(other.rings, found, sizeof found, 0) == 0);
        CHECK(other.pipe.ended() == pipe_no_part);
    }
}

void nonsense_in_the_word_of_a_loan_is_refused() {
    const auto payload = pattern(3 * long_array, 8);
    Connection connection(true);
    End mine(connection, 0, {.pid = getpid(), .crew = nullptr, .helpers = 0, .lends = true});
    std::thread sender([&] { send_loan(mine, payload, 20 * second); });
    while (mine.out.control().written.count.bytes.load() < sizeof(CallHeader) + 3 + sizeof(PayloadPart)) std::this_thread::yield();
    mine.out.control().loan.store(Loan::open(1) + long_array + 1);
    mine.out.bell().wake();
    sender.join();
    CHECK(mine.pipe.ended() == pipe_broken);
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

void a_goodbye_beside_rings_is_known() {
    for (const std::uint64_t call : {0, 1}) {  // a goodbye has no number
        Connection connection(true);
        End mine(connection, 0);
        const CallHeader header{.magic = {'P', 'C'}, .kind = kind_goodbye, .zero = 0, .head = 0, .call = call, .payload = 0};
        CHECK(::send(connection.sockets[1], &header, sizeof header, 0) == sizeof header);
        CHECK(mine.pipe.may_sleep(mine.rings));
        mine.wait(POLLIN);
        CHECK(mine.pipe.ended() == (call == 0 ? pipe_goodbye : pipe_beside));
    }
}

void nonsense_in_the_counters_is_refused() {
    Connection connection(true);
    End mine(connection, 0);
    mine.in.control().written.count.bytes.store(1 << 30);
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
    a_goodbye_beside_rings_is_known();
    nonsense_in_the_counters_is_refused();
    a_severed_ring_ends_both();
    loans();
    loans_that_are_taken_back();
    loans_that_are_refused();
    nonsense_in_a_part_is_refused();
    nonsense_in_the_word_of_a_loan_is_refused();
    std::printf("%d checks, %d failed\n", checks.load(), failures.load());
    return failures.load() == 0 ? 0 : 1;
}
