// SPDX-License-Identifier: Apache-2.0
// The scenarios of vocab_parallel_test.cc on real ranks: run under mpirun, every rank runs every
// test. --level=LEVEL: what MPI is initialised with. --die: see run_until_killed.
#include <gtest/gtest.h>
#include <mpi.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "logitless/parallel/mpi_communicator.h"
#include "tests/parallel/scenarios.h"
#include "tests/parallel/thread_ranks.h"
#include "tests/support/judge.h"
#include "tests/support/sanitizers.h"

#ifdef LOGITLESS_ADDRESS_SANITIZED
// Open MPI keeps much of what it allocates, and so does clang's OpenMP.
extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() {
  return "leak:libomp.so\nleak:libmpi.so\nleak:libopen-rte.so\nleak:libopen-pal.so\n"
         "leak:libpmix.so\nleak:libevent\nleak:libhwloc.so\nleak:mca_";
}
#endif

namespace logitless::test {
namespace {

int level = MPI_THREAD_SERIALIZED;
std::string before_init;  // what mpi_communicator said then

std::unique_ptr<Communicator> world() {
  auto made = mpi_communicator(MPI_COMM_WORLD);
  if (!made) {
    ADD_FAILURE() << made.error().message;
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  return std::move(made).value();
}

int ranks() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

void expect_scenarios(std::vector<Scenario> (*scenarios)(int ranks, Strategy strategy)) {
  const auto communicator = world();
  for (const Strategy strategy : kStrategies) {
    for (const Scenario& s : scenarios(ranks(), strategy)) {
      SCOPED_TRACE(s.name);
      expect_sharded(*communicator, s.step);
    }
  }
}

TEST(Mpi, EveryCoverIsWithinTheContract) { expect_scenarios(cover_scenarios); }
TEST(Mpi, EdgesAreDefined) { expect_scenarios(edge_scenarios); }
TEST(Mpi, EveryOptionCounts) { expect_scenarios(option_scenarios); }

// Merged in rank order by ourselves: which transport moved the bytes leaves no trace. (Sums of
// gradients are added by the transport, in its own order.)
TEST(Mpi, LossesHaveTheBitsOfAnyTransport) {
  const auto communicator = world();
  ShardedStep s;
  s.step = make_step({.BT = 23, .V = 170, .H = 40}, all_arithmetics()[1]);
  s.cover = uneven_cover(170, ranks());
  s.chunk_tokens = 8;
  for (const Strategy strategy : kStrategies) {
    s.strategy = strategy;
    const RankResult mine = run_rank(*communicator, s);
    ASSERT_TRUE(mine.result);
    std::vector<uint64_t> threads;
    run_ranks(ranks(), [&](Communicator& c) {
      const RankResult r = run_rank(c, s);
      if (c.rank() == 0) threads = r.step.loss.all_bits();
    });
    EXPECT_EQ(mine.step.loss.all_bits(), threads);
  }
}

TEST(Mpi, TwoRunsHaveTheSameBits) {
  const auto communicator = world();
  for (const int turn : {0, 1, 2, 3}) {
    ShardedStep s;
    s.step = make_step({.BT = 40, .V = 170, .H = 40}, all_arithmetics()[1]);
    s.cover = uneven_cover(170, ranks());
    s.chunk_tokens = 8;
    s.grad_input_rows = turn % 2 == 1 ? TokenRows::slice : TokenRows::all;
    s.strategy = kStrategies[turn / 2];
    const auto first = run_rank(*communicator, s).step.bits();
    for (int again = 0; again < 5; ++again) {
      EXPECT_EQ(run_rank(*communicator, s).step.bits(), first);
    }
  }
}

TEST(Mpi, TheVerbs) {
  const auto communicator = world();
  const int p = communicator->size();
  const int rank = communicator->rank();
  ASSERT_EQ(p, ranks());
  // Sizes that are and are not multiples of the 64 bytes that long gathers count in.
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{64}, size_t{100}, size_t{1} << 16}) {
    std::vector<std::byte> mine(bytes, std::byte(rank + 1)), all(bytes * static_cast<size_t>(p));
    ASSERT_TRUE(communicator->all_gather(mine, all));
    for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], std::byte(i / bytes + 1));
    std::vector<std::byte> later(all.size());
    auto pending = communicator->start_all_gather(mine, later);
    ASSERT_TRUE(pending);
    ASSERT_TRUE((*pending)->wait());
    EXPECT_EQ(later, all);
  }
  const float sum_of_ranks = static_cast<float>(p * (p - 1) / 2);
  for (const size_t n : {size_t{0}, size_t{1}, size_t{7}, size_t{100000}}) {
    std::vector<float> values(n, static_cast<float>(rank)), later = values;
    ASSERT_TRUE(communicator->all_reduce_sum(values));
    auto pending = communicator->start_all_reduce_sum(later);
    ASSERT_TRUE(pending);
    ASSERT_TRUE((*pending)->wait());
    for (const float v : values) ASSERT_EQ(v, sum_of_ranks);
    EXPECT_EQ(later, values);
  }
  // Rank r gets r + 1 floats, then none for the even ones.
  for (const bool holes : {false, true}) {
    std::vector<int64_t> counts;
    for (int r = 0; r < p; ++r) counts.push_back(holes && r % 2 == 0 ? 0 : r + 1);
    std::vector<float> values;
    for (int r = 0; r < p; ++r) {
      values.insert(values.end(), static_cast<size_t>(counts[static_cast<size_t>(r)]),
                    static_cast<float>(100 * r + rank));
    }
    std::vector<float> mine(static_cast<size_t>(counts[static_cast<size_t>(rank)]));
    ASSERT_TRUE(communicator->reduce_scatter_sum(values, counts, mine));
    for (const float v : mine) EXPECT_EQ(v, static_cast<float>(100 * rank * p) + sum_of_ranks);
  }
}

TEST(Mpi, SumsUnderWayDoNotDisturbEachOther) {
  const auto communicator = world();
  std::vector<std::vector<float>> values;
  std::vector<std::unique_ptr<PendingSum>> pending;
  for (int i = 0; i < 6; ++i) {
    values.emplace_back(50000, static_cast<float>(i + communicator->rank()));
  }
  for (auto& v : values) {
    auto started = communicator->start_all_reduce_sum(v);
    ASSERT_TRUE(started);
    pending.push_back(std::move(started).value());
  }
  // Waited for in another order, two of them by their destructors.
  for (const int i : {3, 0, 5, 1}) ASSERT_TRUE(pending[static_cast<size_t>(i)]->wait());
  pending.clear();
  const int p = communicator->size();
  for (int i = 0; i < 6; ++i) {
    for (const float v : values[static_cast<size_t>(i)]) {
      ASSERT_EQ(v, static_cast<float>(i * p + p * (p - 1) / 2));
    }
  }
}

TEST(Mpi, ABadArgumentIsTheSameErrorOnEveryRank) {
  const auto communicator = world();
  const int last = communicator->size() - 1;
  ShardedStep s;
  s.step = make_step({.BT = 20, .V = 60, .H = 16}, all_arithmetics()[1]);
  s.cover = balanced_cover(60, communicator->size());
  const RankResult r = run_rank(*communicator, s, [&](RankArguments& a) {
    if (communicator->rank() == last) a.outputs.loss.size = 19;
  });
  ASSERT_FALSE(r.result);
  const std::string who = last == 0 ? "" : "rank " + std::to_string(last) + ": ";
  EXPECT_EQ(r.result.error().message, who + "loss: size is 19, must be BT = 20");
  // And the communicator is as good as before.
  EXPECT_TRUE(run_rank(*communicator, s).result);
}

// Data parallel beside vocabulary parallel: groups of two ranks share a vocabulary.
TEST(Mpi, GroupsOfRanksAreCommunicatorsOfTheirOwn) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm pair = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank / 2, rank, &pair);
  {
    auto communicator = mpi_communicator(pair);
    ASSERT_TRUE(communicator);
    ShardedStep s;
    s.step = make_step({.BT = 10 + rank / 2, .V = 60, .H = 16}, all_arithmetics()[1]);
    s.step.normalizer = 100;  // the tokens of all groups
    s.cover = balanced_cover(60, (*communicator)->size());
    expect_sharded(**communicator, s);
  }
  MPI_Comm_free(&pair);
}

TEST(Mpi, ErrorsOfMpiBecomeOurs) {
  const auto communicator = world();
  const std::vector<int64_t> counts(static_cast<size_t>(communicator->size()), -1);
  const auto ok = communicator->reduce_scatter_sum({}, counts, {});
  ASSERT_FALSE(ok);
  EXPECT_EQ(ok.error().kind, ErrorKind::communication);
  EXPECT_EQ(ok.error().message.rfind("MPI_Ireduce_scatter: MPI_ERR_COUNT", 0), 0u)
      << ok.error().message;
  float value = 0;
  const auto too_many = communicator->all_reduce_sum({&value, size_t{1} << 31});
  ASSERT_FALSE(too_many);
  EXPECT_EQ(too_many.error().message,
            "all_reduce_sum: 2147483648 floats, must be at most 2^31 - 1: give a smaller "
            "chunk_tokens");
  const auto null = mpi_communicator(MPI_COMM_NULL);
  ASSERT_FALSE(null);
  EXPECT_EQ(null.error().message, "communicator is MPI_COMM_NULL");
  EXPECT_EQ(before_init, "communicator: MPI is not initialised, call MPI_Init_thread before");
}

TEST(Mpi, AnInterCommunicatorIsRefused) {
  if (ranks() < 2) GTEST_SKIP() << "needs two ranks";
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm half = MPI_COMM_NULL, inter = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank == 0 ? 0 : 1, rank, &half);
  MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, rank == 0 ? 1 : 0, 7, &inter);
  const auto made = mpi_communicator(inter);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().message, "communicator: an inter-communicator came, must be an intra-one");
  MPI_Comm_free(&inter);
  MPI_Comm_free(&half);
}

TEST(Mpi, AFunneledCommunicatorBelongsToTheMainThread) {
  const auto communicator = world();
  Result<void> ok;
  std::thread other([&] {
    std::vector<float> nothing;
    if (level == MPI_THREAD_FUNNELED) ok = communicator->all_reduce_sum(nothing);
  });
  other.join();
  if (level != MPI_THREAD_FUNNELED) {
    GTEST_SKIP() << "MPI was initialised with a higher level";
  }
  ASSERT_FALSE(ok);
  EXPECT_EQ(ok.error().message,
            "communicator: used from a thread that did not initialise MPI, which needs "
            "MPI_THREAD_SERIALIZED; MPI was initialised with MPI_THREAD_FUNNELED");
}

// A transport that is late at every call of one rank.
class LateCommunicator final : public Communicator {
 public:
  LateCommunicator(Communicator& inner, int microseconds) : inner_(inner), late_(microseconds) {}
  int rank() const noexcept override { return inner_.rank(); }
  int size() const noexcept override { return inner_.size(); }
  Result<void> all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    std::this_thread::sleep_for(late_);
    return inner_.all_gather(mine, all);
  }
  Result<std::unique_ptr<Pending>> start_all_gather(std::span<const std::byte> mine,
                                                    std::span<std::byte> all) override {
    std::this_thread::sleep_for(late_);
    return inner_.start_all_gather(mine, all);
  }
  Result<std::unique_ptr<PendingSum>> start_all_reduce_sum(std::span<float> values) override {
    std::this_thread::sleep_for(late_);
    return inner_.start_all_reduce_sum(values);
  }
  Result<std::unique_ptr<PendingSum>> start_reduce_scatter_sum(std::span<const float> values,
                                                               std::span<const int64_t> counts,
                                                               std::span<float> mine) override {
    std::this_thread::sleep_for(late_);
    return inner_.start_reduce_scatter_sum(values, counts, mine);
  }

 private:
  Communicator& inner_;
  std::chrono::microseconds late_;
};

// Label slow: 200 runs, one rank late by turns.
TEST(MpiSlow, ALateRankChangesNoBitAndHangsNobody) {
  const auto communicator = world();
  for (const int way : {0, 1, 2, 3}) {
    ShardedStep s;
    s.step = make_step({.BT = 40, .V = 90, .H = 16}, all_arithmetics()[1]);
    s.cover = uneven_cover(90, ranks());
    s.chunk_tokens = 6;
    s.grad_input_rows = way % 2 == 1 ? TokenRows::slice : TokenRows::all;
    s.strategy = kStrategies[way / 2];
    const auto in_time = run_rank(*communicator, s).step.bits();
    for (int turn = 0; turn < 200; ++turn) {
      const bool is_late = turn % ranks() == communicator->rank();
      LateCommunicator late(*communicator, is_late ? 300 * (1 + turn % 5) : 0);
      EXPECT_EQ(run_rank(late, s).step.bits(), in_time) << "turn " << turn;
    }
  }
}

// --die: runs for ever; the last rank kills itself after some steps.
[[noreturn]] void run_until_killed() {
  const auto communicator = world();
  ShardedStep s;
  s.step = make_step({.BT = 40, .V = 90, .H = 16}, all_arithmetics()[1]);
  s.cover = balanced_cover(90, ranks());
  s.chunk_tokens = 6;
  s.strategy = Strategy::automatic;
  for (int step = 0;; ++step) {
    const bool dies = step == 5 && communicator->rank() == communicator->size() - 1;
    const RankResult r = run_rank(*communicator, s, [&](RankArguments&) {
      if (dies) std::raise(SIGKILL);
    });
    if (!r.result) {
      std::fprintf(stderr, "rank %d: %s\n", communicator->rank(), r.result.error().message.c_str());
      std::exit(1);
    }
  }
}

int parse_level(std::string_view name) {
  if (name == "single") return MPI_THREAD_SINGLE;
  if (name == "funneled") return MPI_THREAD_FUNNELED;
  if (name == "multiple") return MPI_THREAD_MULTIPLE;
  return MPI_THREAD_SERIALIZED;
}

// A level too low for threads that compute: refused, on one rank.
int check_single() {
  const auto made = mpi_communicator(MPI_COMM_WORLD);
  const std::string want =
      "communicator: MPI was initialised with MPI_THREAD_SINGLE, must be MPI_THREAD_FUNNELED or "
      "higher (MPI_Init_thread): operators compute on several threads";
  const std::string got = made ? "no error" : made.error().message;
  std::printf("%s\n", got.c_str());
  return got == want ? 0 : 1;
}

// Ranks other than 0 speak only of failures.
class Failures : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "rank %d: %s:%d: %s\n", ranks() > 0 ? rank_ : 0, result.file_name(),
                 result.line_number(), result.summary());
  }

 public:
  explicit Failures(int rank) : rank_(rank) {}

 private:
  int rank_;
};

}  // namespace

int run_all(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  bool dies = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with("--level=")) level = parse_level(argument.substr(8));
    if (argument == "--die") dies = true;
  }
  if (const auto early = mpi_communicator(MPI_COMM_WORLD); !early) {
    before_init = early.error().message;
  }
  int provided = 0;
  MPI_Init_thread(&argc, &argv, level, &provided);
  int status = 0;
  if (provided < level) {
    std::fprintf(stderr, "this MPI has no such thread level\n");
    status = 1;
  } else if (level == MPI_THREAD_SINGLE) {
    status = check_single();
  } else if (dies) {
    run_until_killed();
  } else {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    auto& listeners = testing::UnitTest::GetInstance()->listeners();
    if (rank != 0) {
      delete listeners.Release(listeners.default_result_printer());
      listeners.Append(new Failures(rank));
    }
    status = RUN_ALL_TESTS();
    if (rank == 0) print_margins();
  }
  MPI_Finalize();
  return status;
}

}  // namespace logitless::test

int main(int argc, char** argv) { return logitless::test::run_all(argc, argv); }
