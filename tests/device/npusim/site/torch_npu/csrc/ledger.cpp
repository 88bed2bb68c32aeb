// What the processes of one simulated machine know of each other: who uses a device, and how much of it.
//
// Each device has a file in `NPU_SIM_HOST`. A process that uses the device has a row there and a lock on that
// row, which the kernel drops with the process: a row without a lock is a dead process's and holds nothing.
#include "device.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <mutex>
#include <string>

namespace npusim {
namespace {

// `npusim.usage` reads these rows; every field is an int64.
struct Row {
  int64_t pid, rank, held, peak;
};
constexpr int kRows = 1024;
struct Sheet {
  Row together;  // `held` is not used, `peak` is the most that all processes held at once
  std::array<Row, kRows> rows;
};

class Ledger {
 public:
  Ledger(const std::string& directory, int device) {
    auto path = directory + "/npu-" + std::to_string(device);
    file_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    TORCH_CHECK(file_ >= 0, "NPU_SIM_HOST: cannot open ", path);
    lock(0, F_WRLCK, F_SETLKW);
    struct stat found {};
    bool grown = ::fstat(file_, &found) == 0 &&
                 (found.st_size >= off_t(sizeof(Sheet)) || ::ftruncate(file_, sizeof(Sheet)) == 0);
    void* mapped = ::mmap(nullptr, sizeof(Sheet), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    TORCH_CHECK(grown && mapped != MAP_FAILED, "NPU_SIM_HOST: cannot map ", path);
    sheet_ = static_cast<Sheet*>(mapped);
    alone_ = others().second == 0;
    auto& rows = sheet_->rows;
    auto* unused = std::find_if(rows.begin(), rows.end(), [](const Row& row) { return row.pid == 0; });
    TORCH_CHECK(unused != rows.end(), "NPU_SIM_HOST: ", path, " is full");
    own_ = static_cast<int>(unused - rows.begin());
    const char* rank = std::getenv("RANK");
    *unused = {::getpid(), rank ? std::atoll(rank) : -1, 0, 0};
    lock(1 + own_, F_WRLCK, F_SETLK);
    lock(0, F_UNLCK, F_SETLK);
  }

  bool alone() const { return alone_; }

  bool hold(int64_t bytes, int64_t capacity) {
    lock(0, F_WRLCK, F_SETLKW);
    auto& own = sheet_->rows[own_];
    auto total = others().first + bytes;
    bool fits = bytes <= own.held || total <= capacity;
    if (fits) {
      own.held = bytes;
      own.peak = std::max(own.peak, bytes);
      sheet_->together.peak = std::max(sheet_->together.peak, total);
    }
    lock(0, F_UNLCK, F_SETLK);
    return fits;
  }

  int64_t held_by_others() {
    lock(0, F_WRLCK, F_SETLKW);
    auto bytes = others().first;
    lock(0, F_UNLCK, F_SETLK);
    return bytes;
  }

 private:
  // Bytes and number of the other living processes.
  std::pair<int64_t, int> others() {
    int64_t bytes = 0;
    int count = 0;
    for (int i = 0; i < kRows && sheet_->rows[i].pid != 0; ++i) {
      if (i == own_ || !lives(i)) continue;
      bytes += sheet_->rows[i].held;
      ++count;
    }
    return {bytes, count};
  }

  bool lives(int row) {
    struct flock asked = range(1 + row, F_WRLCK);
    TORCH_CHECK(::fcntl(file_, F_GETLK, &asked) == 0, "NPU_SIM_HOST: cannot ask for a lock");
    return asked.l_type != F_UNLCK;
  }

  static struct flock range(int byte, short kind) {
    struct flock wanted {};
    wanted.l_type = kind;
    wanted.l_whence = SEEK_SET;
    wanted.l_start = byte;
    wanted.l_len = 1;
    return wanted;
  }

  void lock(int byte, short kind, int command) {
    auto wanted = range(byte, kind);
    TORCH_CHECK(::fcntl(file_, command, &wanted) == 0, "NPU_SIM_HOST: cannot lock");
  }

  int file_ = -1, own_ = -1;
  bool alone_ = true;
  Sheet* sheet_ = nullptr;
};

std::mutex mutex;

// Locks of a file belong to the process: a ledger stays open until its end.
Ledger* ledger(c10::DeviceIndex index) {
  static const char* directory = std::getenv("NPU_SIM_HOST");
  if (!directory || !*directory) return nullptr;
  static std::array<Ledger*, 256> open{};
  auto& found = open.at(index);
  if (!found) found = new Ledger(directory, physical_device(index));
  return found;
}

}  // namespace

void enter(c10::DeviceIndex index) {
  std::lock_guard<std::mutex> guard(mutex);
  auto* shared = ledger(index);
  const char* exclusive = std::getenv("NPU_SIM_EXCLUSIVE");
  bool refused = shared && exclusive && *exclusive == '1' && !shared->alone();
  TORCH_CHECK(!refused, "NPU function error: c10_npu::SetDevice(device_id_), error code is 507033\n",
              "[ERROR] (PID:", ::getpid(), ", Device:", int(index),
              ", RankID:-1) ERR00100 PTA call acl api failed\n",
              "[Error]: Failed to start the device. Another process uses it (NPU_SIM_EXCLUSIVE).");
}

bool hold(c10::DeviceIndex index, int64_t bytes, int64_t capacity) {
  // A forked child has neither the locks nor the device of its parent.
  if (in_bad_fork()) return true;
  std::lock_guard<std::mutex> guard(mutex);
  auto* shared = ledger(index);
  return shared ? shared->hold(bytes, capacity) : bytes <= capacity;
}

int64_t held_by_others(c10::DeviceIndex index) {
  std::lock_guard<std::mutex> guard(mutex);
  auto* shared = ledger(index);
  return shared ? shared->held_by_others() : 0;
}

}  // namespace npusim
