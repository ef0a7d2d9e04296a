// What has happened in the threads, for their owner.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "common/fd.h"
#include "transport/multicast/multicast.h"

namespace paceline {

// A file descriptor that is readable from ring() to quiet().
class EventFd {
 public:
  EventFd();
  int fd() const { return fd_.get(); }
  void ring() const;
  void quiet() const;
  void close() { fd_.reset(); }

 private:
  Fd fd_;
};

class MulticastEvents {
 public:
  int fd() const { return bell_.fd(); }
  void add(Multicast::Event event);
  // The same, unless it is there and was not taken yet.
  void add_once(Multicast::Event event);
  // A thread has ended; the first reason stays.
  void fail(const std::string& reason) noexcept;
  std::vector<Multicast::Event> take();
  std::string failure() const;
  void close() { bell_.close(); }

 private:
  mutable std::mutex mutex_;
  std::vector<Multicast::Event> events_;
  std::string failure_;
  EventFd bell_;
};

}  // namespace paceline
