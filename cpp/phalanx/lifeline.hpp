// A connection that ends at the moment this process begins to die.
//
// The threads of a process that is killed end one by one. The last of them gives the memory back, which takes seconds with
// many gigabytes, and closes what it has open only after that: nobody hears of the death meanwhile. So this connection
// belongs to a thread with descriptors of its own, which does nothing but wait. Two threads that share no descriptors cannot
// both be the last one: of this connection and the others of the process, one at least ends at once.
#pragma once

#include <pthread.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <memory>
#include <mutex>
#include <system_error>

namespace phalanx {

class Lifeline {
public:
    // Holds the connection behind a descriptor, which the caller closes next. Throws std::system_error if there is no thread
    // to be had, or if the kernel does not give one descriptors of its own (before Linux 5.9; a seccomp filter).
    explicit Lifeline(int fd) : state_(std::make_shared<State>()), made_by_(getpid()) {
        state_->fd = fd;
        auto passed = std::make_unique<std::shared_ptr<State>>(state_);
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // a handler would find none of its descriptors there
        const int error = pthread_create(&thread_, nullptr, &run, passed.get());
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (error != 0) throw std::system_error(error, std::generic_category());
        passed.release();
        std::unique_lock lock(state_->lock);
        state_->changed.wait(lock, [&] { return state_->began; });
        if (state_->error == 0) return;
        lock.unlock();
        pthread_join(thread_, nullptr);
        throw std::system_error(state_->error, std::generic_category());
    }
    ~Lifeline() { let_go(); }
    Lifeline(const Lifeline&) = delete;
    Lifeline& operator=(const Lifeline&) = delete;

    // Says goodbye, so that the end of the connection is not taken for the end of the process. May be called twice. In a
    // forked child, where there is no such thread, it does nothing.
    void let_go() {
        if (ended_ || getpid() != made_by_) return;
        ended_ = true;
        {
            const std::lock_guard guard(state_->lock);
            state_->ending = true;
        }
        state_->changed.notify_all();
        pthread_join(thread_, nullptr);
    }

private:
    // Shared with the thread, which may outlive this object when the program ends.
    struct State {
        std::mutex lock;
        std::condition_variable changed;
        int fd = -1;
        int error = 0;
        bool began = false;
        bool ending = false;
    };

    static void* run(void* passed) {
        const std::unique_ptr<std::shared_ptr<State>> mine(static_cast<std::shared_ptr<State>*>(passed));
        State& state = **mine;
        pthread_setname_np(pthread_self(), "phalanx-life");
        const int error = keep_only(static_cast<unsigned>(state.fd)) ? 0 : errno;
        std::unique_lock lock(state.lock);
        state.error = error;
        state.began = true;
        state.changed.notify_all();
        if (error != 0) return nullptr;
        state.changed.wait(lock, [&] { return state.ending; });
        say_goodbye(state.fd);
        return nullptr;  // what only this thread has open is closed with it
    }

    // Gives this thread descriptors of its own, of which it keeps one.
    static bool keep_only(unsigned fd) noexcept {
        constexpr unsigned unshare = 1U << 1;  // CLOSE_RANGE_UNSHARE, which not all headers have
        if (close_range(fd + 1, ~0U, unshare) != 0) return false;
        if (fd > 0) close_range(0, fd - 1, 0);
        return true;
    }

    static long close_range(unsigned first, unsigned last, unsigned flags) noexcept {
        constexpr long number = 436;  // the same on all processors
        return syscall(number, first, last, flags);
    }

    // If something is left to read, closing the connection would also take back what was sent.
    static void say_goodbye(int fd) noexcept {
        char ignored[512];
        while (recv(fd, ignored, sizeof ignored, MSG_DONTWAIT) > 0) {
        }
        send(fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    }

    std::shared_ptr<State> state_;
    pthread_t thread_{};
    pid_t made_by_;
    bool ended_ = false;
};

}  // namespace phalanx
