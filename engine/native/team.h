// Threads of one worker. They spin for some microseconds inside a step, where the next phase is
// never far, and block between steps: an idle worker uses no CPU.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace sluice {

class Team {
   public:
    explicit Team(int num_threads) : size_(num_threads < 1 ? 1 : num_threads), scratch_(size_) {
        for (int rank = 1; rank < size_; ++rank)
            threads_.emplace_back([this, rank] { serve(rank); });
    }

    ~Team() {
        stopping_ = true;
        epoch_.fetch_add(1);
        epoch_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    int size() const { return size_; }

    // Calls job(rank) once on every thread, the caller being rank 0; returns when all have returned.
    template <class Job>
    void run(const Job& job) {
        invoke_ = [](const void* that, int rank) { (*static_cast<const Job*>(that))(rank); };
        job_ = &job;
        if (size_ > 1) {
            epoch_.fetch_add(1);
            epoch_.notify_all();
        }
        job(0);
        barrier();
    }

    // Inside a job, called by every thread with the same count: body(index) once per index, on
    // whichever thread is free. All are done when it returns.
    template <class Body>
    void for_each(int count, const Body& body) {
        for (int index; (index = next_.fetch_add(1, std::memory_order_relaxed)) < count;)
            body(index);
        barrier();
    }

    // Memory of one thread that lives as long as the team; its content is lost at the next call.
    char* scratch(int rank, size_t nbytes) {
        auto& memory = scratch_[rank];
        if (memory.size() < nbytes + 64) memory.resize(nbytes + 64);
        return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~63ul);
    }

    void barrier() {
        if (size_ == 1) {
            next_.store(0, std::memory_order_relaxed);
            return;
        }
        const uint32_t phase = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            phase_.fetch_add(1, std::memory_order_release);
            phase_.notify_all();
        } else {
            wait_for_change(phase_, phase);
        }
    }

   private:
    static constexpr int SPINS = 600;

    static void wait_for_change(const std::atomic<uint32_t>& value, uint32_t seen) {
        for (int spin = 0; spin < SPINS; ++spin) {
            if (value.load(std::memory_order_acquire) != seen) return;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        while (value.load(std::memory_order_acquire) == seen) value.wait(seen);
    }

    void serve(int rank) {
        for (uint32_t epoch = 0;;) {
            wait_for_change(epoch_, epoch);
            epoch = epoch_.load(std::memory_order_acquire);
            if (stopping_) return;
            invoke_(job_, rank);
            barrier();
        }
    }

    const int size_;
    std::vector<std::thread> threads_;
    std::vector<std::vector<char>> scratch_;
    std::atomic<uint32_t> epoch_{0}, phase_{0};
    std::atomic<int> arrived_{0}, next_{0};
    std::atomic<bool> stopping_{false};
    void (*invoke_)(const void*, int) = nullptr;
    const void* job_ = nullptr;
};

}  // namespace sluice
