// The ring alone, without Python: two threads or two processes as its sides. Run by `make sanitize`.

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "phalanx/frame.hpp"
#include "phalanx/message_loans.hpp"
#include "phalanx/transfer.hpp"

using namespace phalanx;

namespace {

constexpr std::int64_t second = 1'000'000'000;
const std::atomic<std::uint32_t> nobody{0};

Bound within(std::int64_t ns, const std::atomic<std::uint32_t>& wanted = nobody) {
    return {monotonic_ns() + ns, &wanted, nullptr};
}

// A ring and the socket that belongs to it.
struct Shared {
    explicit Shared(std::size_t size) : bytes(ring_control_bytes + size), size(size) {
        memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED || socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0) std::abort();
        new (memory) RingControl;
    }
    ~Shared() {
        munmap(memory, bytes);
        close(sockets[0]);
        close(sockets[1]);
    }
    RingWriter writer() { return {memory, size, sockets[0]}; }
    RingReader reader() { return {memory, size, sockets[1]}; }
    RingControl& control() { return *static_cast<RingControl*>(memory); }

    void* memory;
    std::size_t bytes;
    std::size_t size;
    int sockets[2];
};

std::vector<std::byte> pattern(std::size_t size, unsigned seed) {
    std::vector<std::byte> made(size);
    for (std::size_t i = 0; i < size; ++i) made[i] = static_cast<std::byte>(i * 31 + seed * 7 + (i >> 8));
    return made;
}

// Messages of random sizes, the same on both sides.
std::vector<std::size_t> sizes(unsigned seed, int count, std::size_t most) {
    std::mt19937 random(seed);
    std::vector<std::size_t> made;
    for (int i = 0; i < count; ++i) made.push_back(random() % (i % 7 == 0 ? most : 200));
    return made;
}

void write_messages(RingWriter& ring, const std::vector<std::size_t>& messages, const Patience& patience) {
    unsigned seed = 0;
    for (const std::size_t size : messages) {
        const auto bytes = pattern(size, seed++);
        std::size_t done = 0;
        CHECK(write_on(ring, bytes.data(), size, done, patience, within(20 * second)) == Outcome::done);
        CHECK(done == size);
    }
}

void read_messages(RingReader& ring, const std::vector<std::size_t>& messages, const Patience& patience) {
    unsigned seed = 0;
    for (const std::size_t size : messages) {
        std::vector<std::byte> bytes(size);
        std::size_t done = 0;
        CHECK(read_on(ring, bytes.data(), size, done, patience, within(20 * second)) == Outcome::done);
        CHECK(bytes == pattern(size, seed++));
    }
}

void between_threads() {
    for (const Patience patience : {Patience{2000, 0}, Patience{10, 2}, Patience{0, 0}}) {
        Shared shared(4096);
        const auto messages = sizes(1, 200, 30'000);
        std::thread other([&] {
            RingReader ring = shared.reader();
            read_messages(ring, messages, patience);
        });
        RingWriter ring = shared.writer();
        write_messages(ring, messages, patience);
        other.join();
    }
}

void between_processes() {
    Shared shared(8192);
    const auto messages = sizes(2, 300, 100'000);
    const pid_t child = fork();
    if (child == 0) {
        failures = 0;
        RingReader ring = shared.reader();
        read_messages(ring, messages, Patience{50, 5});
        _exit(failures == 0 ? 0 : 1);
    }
    RingWriter ring = shared.writer();
    write_messages(ring, messages, Patience{50, 5});
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void it_wraps_at_every_place() {
    Shared shared(4096);
    RingWriter writer = shared.writer();
    RingReader reader = shared.reader();
    for (unsigned i = 0; i < 5000; ++i) {
        const auto bytes = pattern(1 + i % 97, i);
        CHECK(writer.room(bytes.size()) >= bytes.size());
        writer.put(bytes.data(), bytes.size());
        writer.publish();
        CHECK(reader.available(bytes.size()) == bytes.size());
        CHECK(reader.begins_with(bytes.data(), bytes.size()));
        std::vector<std::byte> seen(bytes.size());
        reader.peek(seen.data(), seen.size());
        CHECK(seen == bytes);
        seen.back() ^= std::byte{1};
        CHECK(!reader.begins_with(seen.data(), seen.size()));
        reader.skip(bytes.size());
        reader.publish();
    }
}

void full_and_empty() {
    Shared shared(4096);
    RingWriter writer = shared.writer();
    RingReader reader = shared.reader();
    const auto bytes = pattern(4096, 3);
    CHECK(writer.room(1) == 4096);
    CHECK(reader.available(1) == 0);
    writer.put(bytes.data(), 4096);
    CHECK(reader.available(1) == 0);  // not yet published
    writer.publish();
    CHECK(writer.room(1) == 0);
    CHECK(reader.available(1) == 4096);
    std::size_t done = 0;
    CHECK(write_on(writer, bytes.data(), 10, done, Patience{5, 0}, within(second / 50)) == Outcome::timed_out);
    CHECK(done == 0);
    reader.skip(7);
    reader.publish();
    CHECK(write_on(writer, bytes.data(), 10, done, Patience{5, 0}, within(second / 50)) == Outcome::timed_out);
    CHECK(done == 7);  // what fitted is there, and counted
}

void a_wait_can_be_ended() {
    Shared shared(4096);
    RingReader reader = shared.reader();
    std::atomic<std::uint32_t> wanted{0};
    std::thread other([&] {
        usleep(20'000);
        wanted.store(1);
        shared.control().reader.bell.wake();
    });
    const std::int64_t began = monotonic_ns();
    CHECK(await_bytes(reader, 1, Patience{10, 0}, within(5 * second, wanted)) == Outcome::aborted);
    CHECK(monotonic_ns() - began < second);
    other.join();
}

void closing_wakes_the_other_side() {
    Shared shared(4096);
    RingWriter writer = shared.writer();
    RingReader reader = shared.reader();
    std::thread other([&] {
        usleep(20'000);
        const auto bytes = pattern(5, 0);
        writer.put(bytes.data(), 5);
        writer.publish();
        writer.leave();
    });
    std::byte got[8];
    std::size_t done = 0;
    CHECK(read_on(reader, got, 8, done, Patience{10, 0}, within(5 * second)) == Outcome::aborted);
    CHECK(done == 5);  // what was written before is read
    other.join();
    CHECK(reader.other_closed() && !reader.severed());
    reader.sever();
    CHECK(reader.severed() && writer.severed());
}

int bytes_on(int socket) {
    pollfd polled{socket, POLLIN, 0};
    if (poll(&polled, 1, 0) <= 0) return 0;
    char scratch[64];
    return static_cast<int>(recv(socket, scratch, sizeof scratch, MSG_DONTWAIT));
}

void a_poller_gets_one_byte() {
    Shared shared(4096);
    RingWriter writer = shared.writer();
    RingReader reader = shared.reader();
    const auto bytes = pattern(4, 0);
    const auto put = [&] {
        writer.put(bytes.data(), 4);
        writer.publish();
    };
    put();
    CHECK(bytes_on(shared.sockets[1]) == 0);  // nobody asked
    reader.ask_for_byte();
    put();
    put();
    CHECK(bytes_on(shared.sockets[1]) == 1);
    reader.ask_for_byte();
    reader.ask_for_no_byte();
    put();
    CHECK(bytes_on(shared.sockets[1]) == 0);
    writer.ask_for_byte();
    reader.skip(4);
    reader.publish();
    CHECK(bytes_on(shared.sockets[0]) == 1);
}

void nonsense_is_not_followed() {
    const std::uint64_t values[] = {4097, ~0ull, 1ull << 63, ~0ull - 4096};
    for (const std::uint64_t value : values) {
        Shared shared(4096);
        RingReader reader = shared.reader();
        shared.control().written.count.bytes.store(value);
        CHECK(reader.available(1) == 0 && reader.broken());
        std::byte got[8];
        std::size_t done = 0;
        CHECK(read_on(reader, got, 8, done, Patience{}, within(second)) == Outcome::aborted);
        CHECK(done == 0);

        Shared another(4096);
        RingWriter writer = another.writer();
        const auto bytes = pattern(4096, 0);
        writer.put(bytes.data(), 4096);
        writer.publish();
        another.control().read.bytes.store(value);
        CHECK(writer.room(1) == 0 && writer.broken());
        CHECK(write_on(writer, bytes.data(), 8, done, Patience{}, within(second)) == Outcome::aborted);
    }
    // Back to what was already read.
    Shared shared(4096);
    RingReader reader = shared.reader();
    shared.control().written.count.bytes.store(100);
    CHECK(reader.available(100) == 100);
    reader.skip(60);
    shared.control().written.count.bytes.store(50);
    CHECK(reader.available(50) == 0 && reader.broken());
}

void few_bytes_lie_beside_the_count() {
    Shared shared(4096);
    RingWriter writer = shared.writer();
    RingReader reader = shared.reader();
    std::byte* const ring = static_cast<std::byte*>(shared.memory) + ring_control_bytes;
    const auto got = [&](std::size_t size) {
        std::vector<std::byte> bytes(size);
        reader.peek(bytes.data(), size);
        reader.skip(size);
        return bytes;
    };
    const auto first = pattern(40, 1), second_ = pattern(RingFront::most_beside, 2), third = pattern(RingFront::most_beside + 1, 3);
    const auto send = [&](const std::vector<std::byte>& bytes) {
        writer.put(bytes.data(), 7);
        writer.put(bytes.data() + 7, bytes.size() - 7);
        writer.publish();
    };
    // Before they lie in the ring.
    send(first);
    std::memset(ring, 0xee, first.size());
    CHECK(reader.available(1) == first.size() && got(first.size()) == first);
    // Two of them: those of the first lie in the ring when the second is written.
    send(first);
    send(second_);
    CHECK(reader.available(1) == first.size() + second_.size());
    CHECK(got(first.size() + 9) == [&] {
        auto both = first;
        both.insert(both.end(), second_.begin(), second_.begin() + 9);
        return both;
    }());
    CHECK(got(second_.size() - 9) == std::vector(second_.begin() + 9, second_.end()));
    // One that is known, and then one more: what was beside the count is not any more.
    send(first);
    CHECK(reader.available(1) == first.size());
    send(second_);
    CHECK(reader.available(first.size() + 1) == first.size() + second_.size());
    CHECK(got(first.size()) == first && got(second_.size()) == second_);
    // Too many for it.
    send(third);
    CHECK(shared.control().written.count.beside_end.load() == 0);
    CHECK(reader.available(1) == third.size() && got(third.size()) == third);
    // A number that cannot be leads nowhere.
    send(first);
    shared.control().written.count.beside.store(0xffff);
    CHECK(reader.available(1) == first.size());
    got(first.size());
    CHECK(!reader.broken());
}

// At a count whose low bits say that nothing lies beside it.
void few_bytes_at_four_gib() {
    constexpr std::uint64_t four_gib = std::uint64_t{1} << 32;
    Shared shared(1 << 20);
    RingWriter writer = shared.writer();
    RingReader reader = shared.reader();
    const auto sent = pattern(1 << 20, 4);
    const auto send = [&](std::size_t size) {
        CHECK(writer.room(size) >= size);
        writer.put(sent.data(), size);
        writer.publish();
        CHECK(reader.available(size) == size && reader.begins_with(sent.data(), size));
        reader.skip(size);
        reader.publish();
    };
    for (const std::size_t before : {30, 1000}) {  // the last message before that count is short, or long
        while (four_gib - writer.position() % four_gib > sent.size()) send(sent.size());
        send(four_gib - writer.position() % four_gib - before - 20);
        send(20);
        send(before);
        CHECK(writer.position() % four_gib == 0);
        send(20);
    }
}

// Short ones only, with a reader that looks at any time.
void few_bytes_between_threads() {
    constexpr int messages = 20'000;
    Shared shared(1024);
    std::thread other([&] {
        RingReader ring = shared.reader();
        std::mt19937 random(5);
        for (int i = 0; i < messages; ++i) {
            std::vector<std::byte> bytes(1 + static_cast<unsigned>(i) % 130);
            for (unsigned idle = random() % 64; idle > 0; --idle) relax();
            CHECK(await_bytes(ring, 1, Patience{100, 5}, within(20 * second)) == Outcome::done);
            CHECK(ring.available(bytes.size()) >= bytes.size());
            ring.peek(bytes.data(), bytes.size());
            CHECK(bytes == pattern(bytes.size(), static_cast<unsigned>(i)));
            ring.skip(bytes.size());
            ring.publish();
        }
    });
    RingWriter ring = shared.writer();
    for (int i = 0; i < messages; ++i) {
        const auto bytes = pattern(1 + static_cast<unsigned>(i) % 130, static_cast<unsigned>(i));
        if (ring.room(bytes.size()) < bytes.size())
            CHECK(await_room(ring, bytes.size(), Patience{100, 5}, within(20 * second)) == Outcome::done);
        ring.put(bytes.data(), bytes.size());
        ring.publish();
    }
    other.join();
}

void heads_are_messagepack() {
    ArrayHead head;
    const std::ptrdiff_t shape[] = {3, 300, 70'000, 5'000'000'000};
    CHECK(head.make("<f4", 4, shape, 9, 1234));
    const std::string expected("\x93\xa3<f4\x94\x03\xcd\x01\x2c\xce\x00\x01\x11\x70\xcf\0\0\0\x01\x2a\x05\xf2\0\xa5numpy", 30);
    const std::string made(reinterpret_cast<const char*>(head.data()), head.size());
    CHECK(made.substr(0, 4) == std::string("PX\x02\0", 4) && made.substr(24) == expected);
    FrameHeader header;
    std::memcpy(&header, head.data(), sizeof header);
    CHECK(header.description == made.size() - 24 && header.tag == 9 && header.payload == 1234);
    std::vector<std::ptrdiff_t> many(16, 1ll << 40);
    CHECK(head.make("<c16", 15, many.data(), ~0ull, ~0ull));
    CHECK(!head.make("<c16", 16, many.data(), 0, 0));
    CHECK(!head.make("", 1, many.data(), 0, 0));
    CHECK(head.make("<f4", 1, shape, 0, 12, "torch.cuda"));
    CHECK(std::string(reinterpret_cast<const char*>(head.data()), head.size()).ends_with("\x91\x03\xaatorch.cuda"));
    CHECK(!head.make("<f4", 1, shape, 0, 12, "a library of many letters"));
}

// Long messages among short ones, of which the reader takes some where they lie: by `take` as well as by `read_on`.
void read_lent(RingReader& ring, MessageBorrower& borrower, const std::vector<std::size_t>& messages) {
    unsigned seed = 0;
    for (const std::size_t size : messages) {
        std::vector<std::byte> bytes(size);
        std::size_t done = 0;
        if (seed % 3 == 1) std::this_thread::sleep_for(std::chrono::microseconds(seed * 50));
        if (seed % 2 == 0) {
            const Outcome outcome = borrower.read_on(ring, bytes.data(), size, done, Patience{100, 1}, within(20 * second));
            CHECK(outcome == Outcome::done);
        }
        for (const std::int64_t end = monotonic_ns() + 20 * second; done < size && monotonic_ns() < end;) {
            const std::size_t count = std::min({ring.available(size - done), size - done, std::size_t{1000}});
            ring.peek(bytes.data() + done, count);
            ring.skip(count);
            if (count > 0) ring.publish();
            done += count;
            if (count == 0) done += borrower.take(ring, bytes.data() + done, std::min<std::size_t>(size - done, 70'000), false);
        }
        CHECK(bytes == pattern(size, seed++));
    }
}

std::uint64_t write_lent(RingWriter& ring, const std::vector<std::size_t>& messages) {
    MessageLender lender;
    lender.lends_from = 50'000;
    unsigned seed = 0;
    for (const std::size_t size : messages) {
        auto bytes = pattern(size, seed++);
        std::size_t done = 0;
        CHECK(lender.write_on(ring, bytes.data(), size, done, Patience{100, 1}, within(20 * second)) == Outcome::done);
        CHECK(done == size);
        std::fill(bytes.begin(), bytes.end(), std::byte{0xff});  // the memory is the sender's again
    }
    return lender.lent;
}

void lent_messages() {
    for (const bool reads : {true, false}) {
        Shared shared(4096);
        auto messages = sizes(3, 200, 300'000);
        messages.push_back(2'000'000);
        SharedCrew crew(2);
        std::thread other([&] {
            RingReader ring = shared.reader();
            MessageBorrower borrower;
            if (reads) borrower.borrow_from(getpid(), &crew, 2);
            read_lent(ring, borrower, messages);
        });
        RingWriter ring = shared.writer();
        const std::uint64_t lent = write_lent(ring, messages);
        other.join();
        CHECK((lent > 0) == reads);
    }
    // A process reads from another. One that ends in between leaves the sender its memory.
    for (const bool ends : {false, true}) {
        Shared shared(4096);
        const std::vector<std::size_t> messages(20, 200'000);
        const pid_t parent = getpid();
        const pid_t child = fork();
        if (child == 0) {
            RingReader ring = shared.reader();
            MessageBorrower borrower;
            borrower.borrow_from(parent, nullptr, 0);
            read_lent(ring, borrower, ends ? std::vector<std::size_t>{200'000} : messages);
            ring.leave();
            _exit(failures == 0 ? 0 : 1);
        }
        RingWriter ring = shared.writer();
        if (!ends) {
            write_lent(ring, messages);
        } else {
            MessageLender lender;
            lender.lends_from = 50'000;
            const auto bytes = pattern(200'000, 0);
            Outcome outcome = Outcome::done;
            for (int i = 0; i < 3 && outcome == Outcome::done; ++i) {
                std::size_t done = 0;
                outcome = lender.write_on(ring, bytes.data(), bytes.size(), done, Patience{100, 1}, within(20 * second));
            }
            CHECK(outcome == Outcome::aborted);
        }
        int status = 0;
        waitpid(child, &status, 0);
        CHECK(status == 0);
    }
    // Somebody wants the channel: the loan is over at once.
    Shared shared(4096);
    RingWriter ring = shared.writer();
    MessageLender lender;
    lender.lends_from = 50'000;
    const auto bytes = pattern(200'000, 0);
    std::atomic<std::uint32_t> wanted{0};
    std::thread impatient([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        wanted = 1;
        ring.bell().wake();
    });
    std::size_t done = 0;
    CHECK(lender.write_on(ring, bytes.data(), bytes.size(), done, Patience{100, 1}, within(20 * second, wanted)) == Outcome::aborted);
    CHECK(done == 0);
    impatient.join();
}

// Several rings have one crew: whoever does not get it reads alone. It may be let go meanwhile.
int threads_here() {
    return static_cast<int>(std::distance(std::filesystem::directory_iterator("/proc/self/task"), {}));
}

// Where no cores are to spare, that of a lender who rests is: a thread reads along. In an exchange none does.
void helped_on_the_core_of_the_lender() {
    Shared shared(4096);
    SharedCrew crew(2);
    RingReader ring = shared.reader();
    RingWriter writer = shared.writer();
    MessageBorrower borrower;
    borrower.borrow_from(getpid(), &crew, 0);
    MessageLender lender;
    const int before = threads_here();
    for (const bool rests : {false, true}) {
        const auto sent = pattern(4 << 20, rests ? 1 : 2);
        std::vector<std::byte> got(sent.size());
        CHECK(lender.begin(writer, sent.data(), sent.size()) == sent.size());
        CHECK(borrower.take(ring, got.data(), got.size(), rests) == sent.size());
        CHECK(lender.end(writer, sent.size()) == sent.size());
        CHECK(got == sent);
        CHECK(threads_here() == before + (rests ? 1 : 0));
    }
}

void lent_to_several() {
    SharedCrew crew(2);
    const std::vector<std::size_t> messages{1 << 20, 1'500'000, 3'000'001, 1 << 20, 5 << 20, 1'200'000, 1 << 21, 1 << 20};
    std::vector<std::thread> sides;
    std::vector<std::unique_ptr<Shared>> rings;
    std::atomic<std::uint64_t> lent{0};
    for (int i = 0; i < 3; ++i) {
        Shared& shared = *rings.emplace_back(std::make_unique<Shared>(4096));
        sides.emplace_back([&shared, &messages, &crew, i] {
            RingReader ring = shared.reader();
            MessageBorrower borrower;
            borrower.borrow_from(getpid(), &crew, 2);
            for (unsigned seed = 0; const std::size_t size : messages) {
                std::vector<std::byte> bytes(size);
                std::size_t done = 0;
                CHECK(borrower.read_on(ring, bytes.data(), size, done, Patience{100, 1}, within(20 * second)) == Outcome::done);
                CHECK(bytes == pattern(size, seed++));
                if (i == 0 && seed == messages.size() - 1) crew.dismiss();
            }
        });
        sides.emplace_back([&shared, &messages, &lent] {
            RingWriter ring = shared.writer();
            lent += write_lent(ring, messages);
        });
    }
    for (std::thread& side : sides) side.join();
    CHECK(lent > 0);
}

}  // namespace

int main() {
    it_wraps_at_every_place();
    full_and_empty();
    a_wait_can_be_ended();
    closing_wakes_the_other_side();
    a_poller_gets_one_byte();
    nonsense_is_not_followed();
    few_bytes_lie_beside_the_count();
    few_bytes_at_four_gib();
    heads_are_messagepack();
    few_bytes_between_threads();
    between_threads();
    between_processes();
    lent_messages();
    helped_on_the_core_of_the_lender();
    lent_to_several();
    std::printf("%d checks, %d failures\n", checks.load(), failures.load());
    return failures == 0 ? 0 : 1;
}
