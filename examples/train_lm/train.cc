// SPDX-License-Identifier: Apache-2.0
#include "examples/train_lm/train.h"

#include <fmt/format.h>
#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <span>

#include "cli/failure.h"
#include "cli/interrupt.h"
#include "cli/ranks.h"
#include "cli/units.h"
#include "examples/train_lm/checkpoint.h"
#include "examples/train_lm/first_step.h"
#include "examples/train_lm/progress.h"
#include "examples/train_lm/record.h"
#include "examples/train_lm/trainer.h"
#include "logitless/machine.h"

namespace logitless::train_lm {
namespace {

using Clock = std::chrono::steady_clock;

// A run of minutes must not end in a file that cannot be written.
void check_writable(const char* option, const std::string& path) {
  if (path.empty()) return;
  std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (folder.empty()) folder = ".";
  if (::access(folder.c_str(), W_OK) == 0) return;
  cli::fail(fmt::format("{} is {}, and in {} no file can be written", option, cli::printable(path),
                        cli::printable(folder.string())));
}

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

class Training {
 public:
  explicit Training(const TrainArguments& arguments)
      : arguments_(arguments),
        ranks_(cli::open_ranks()),
        speaks_(ranks_.rank() == 0),
        cancel_(cli::cancel_on_interrupt()) {}

  int run() {
    prepare();
    const int64_t last = arguments_.stop_after > 0
                             ? std::min(arguments_.stop_after, arguments_.options.steps)
                             : arguments_.options.steps;
    const ProgressStyle style = parse_progress(arguments_.progress);
    ProgressBar bar(speaks_ ? style : ProgressStyle::none);
    while (trainer_->steps_done() < last) {
      if (!step(bar, last)) {
        bar.finish();
        return interrupted();
      }
    }
    bar.finish();
    // A checkpoint of all steps that was resumed has only this left to do.
    if (record_.held_out.empty() && !judge()) return interrupted();
    save();
    return finish();
  }

 private:
  // Everything that can go wrong before the first step, on any rank.
  void prepare() {
    cli::on_every_rank(ranks_, [&] {
      parse_progress(arguments_.progress);
      if (arguments_.stop_after < 0 || arguments_.held_out_every < 1 || arguments_.save_every < 0) {
        cli::fail("--stop-after and --save-every must be at least 0, --held-out-every at least 1");
      }
      if (speaks_) {
        check_writable("--checkpoint", arguments_.checkpoint);
        check_writable("--record", arguments_.record);
      }
      text_ = read_text(arguments_.texts);
      const Split split = split_text(text_);
      if (split.held_out.empty()) {
        cli::fail(
            fmt::format("the text has {} words, must have at least {}: the first block that is "
                        "held out",
                        text_.words.size(), kBlockWords * (kHeldOutEvery - 1) + 1));
      }
      train_lm::check(arguments_.options, std::ssize(split.training));
      cover_ = cli::take(cli::parse_split(arguments_.split, text_.V(), ranks_.size()));
      fingerprint_ = text_.fingerprint();
    });
    const int threads = cli::threads_of_rank();
    omp_set_num_threads(threads > 0 ? threads : default_threads());  // of the small layers
    trainer_ = make_trainer(ranks_, arguments_.options, text_,
                            cover_[static_cast<size_t>(ranks_.rank())], threads);
    if (!arguments_.resume.empty()) {
      load_checkpoint(arguments_.resume, ranks_, fingerprint_, *trainer_);
    }
    record_.options = to_map(arguments_.options);
    record_.text = fingerprint_;
    record_.V = text_.V();
    record_.ranks = ranks_.size();
    for (const RowRange& rows : cover_) record_.cuts.push_back(rows.begin);
    record_.cuts.push_back(text_.V());
    record_.isa = name_of(trainer_->plan().isa());
    record_.threads = trainer_->plan().threads();
    record_.unigram = unigram_cross_entropy(text_, trainer_->split());
    if (speaks_) introduce();
  }

  void introduce() const {
    const Options& options = arguments_.options;
    fmt::print("text   {} words and marks, {} different ones; every {}th block of {} is held out\n",
               cli::format_count(std::ssize(text_.words)), cli::format_count(text_.V()),
               kHeldOutEvery, kBlockWords);
    fmt::print(
        "model  {} words before the next one, embeddings of {}, a hidden layer of {}, a head "
        "of {} rows\n",
        options.context, options.embedding, options.hidden, cli::format_count(text_.V()));
    std::string rows;
    for (const RowRange& shard : cover_) {
      rows += fmt::format("{}{}", rows.empty() ? "" : " + ", cli::format_count(shard.size()));
    }
    fmt::print("ranks  {}, with {} rows of the head; {}, {} thread{} each\n", ranks_.size(), rows,
               record_.isa, record_.threads, record_.threads == 1 ? "" : "s");
    fmt::print(
        "aim    below {:.4f} nats per held-out word: what the frequency of words alone tells\n",
        record_.unigram);
    if (!arguments_.resume.empty()) {
      fmt::print("going on after step {} of {}\n", trainer_->steps_done(), arguments_.resume);
    }
    std::fflush(stdout);
  }

  // False when it was interrupted; the model is then as after the step before.
  bool step(ProgressBar& bar, int64_t last) {
    const auto start = Clock::now();
    const auto loss = trainer_->step(cancel_);
    if (!settled(loss)) return false;
    const int64_t done = trainer_->steps_done();
    ++steps_timed_;
    record_.seconds += seconds_since(start);
    add(trainer_->sparse_counts());
    if (done == 1 && arguments_.check) check();

    const bool judged = done % arguments_.held_out_every == 0 || done == last;
    if (judged && !judge()) return false;
    const std::string held_out =
        judged ? fmt::format(", held out {:.4f}", record_.held_out.back().second) : "";
    if (judged || steps_timed_ % 10 == 1) count_memory();
    record_.tokens_per_second = static_cast<double>(steps_timed_ * arguments_.options.batch) /
                                std::max(record_.seconds, 1e-9);
    bar.show(done, last,
             fmt::format("loss {:.4f}{}, {} words/s, {}", *loss, held_out,
                         cli::format_count(static_cast<int64_t>(record_.tokens_per_second)),
                         cli::format_bytes(record_.memory_bytes)),
             judged || done == 1);
    if (arguments_.save_every > 0 && done % arguments_.save_every == 0 && done < last) save();
    return true;
  }

  // The held-out loss. False when it was interrupted.
  bool judge() {
    const auto start = Clock::now();
    const auto loss = trainer_->held_out_loss(cancel_);
    if (!settled(loss)) return false;
    record_.seconds += seconds_since(start);
    record_.held_out.emplace_back(trainer_->steps_done(), *loss);
    return true;
  }

  // A loss that is there; false where the ranks were interrupted, together. Other errors, which are
  // the same on every rank, end the run.
  bool settled(const Result<double>& loss) const {
    if (loss) return true;
    if (loss.error().kind == ErrorKind::cancelled) return false;
    throw cli::Failure{.exit_code = cli::kExitBadInput,
                       .message = speaks_ ? loss.error().message : ""};
  }

  void check() {
    const FirstStep first = check_first_step(ranks_, cover_, *trainer_);
    record_.exact_first_loss = first.exact_loss;
    for (const cli::Judgement& judgement : first.judgements) {
      record_.first_step.push_back({.output = judgement.output,
                                    .observed = judgement.observed,
                                    .allowed = judgement.allowed,
                                    .fine = judgement.fine()});
      if (!judgement.fine()) {
        fmt::print("first step: {}\n", cli::describe_worst(judgement));
        fine_ = false;
      }
    }
    if (!speaks_) return;
    const bool sparse = arguments_.options.grad_tolerance > 0;
    const std::string within = fine_ ? "within" : "BEYOND";
    fmt::print("first step's mean loss {:.9f}, in float64 {:.9f}; {}\n", trainer_->losses().front(),
               first.exact_loss,
               sparse ? "losses " + within + " what the arithmetic allows, gradients are sparse"
                      : "gradients " + within + " what the arithmetic allows");
    std::fflush(stdout);
  }

  void add(const SparseCounts& of_step) {
    counts_.rows += of_step.rows;
    counts_.dense_rows += of_step.dense_rows;
    counts_.kept += of_step.kept;
    counts_.elements += of_step.elements;
  }

  void count_memory() {
    const int64_t mine = resident_bytes();
    std::vector<int64_t> all(static_cast<size_t>(ranks_.size()));
    const auto gathered = ranks_.all_gather(std::as_bytes(std::span(&mine, 1)),
                                            std::as_writable_bytes(std::span(all)));
    if (!gathered) cli::fail(gathered.error());
    record_.memory_bytes = 0;
    for (const int64_t bytes : all) record_.memory_bytes += bytes;
  }

  void save() { save_checkpoint(arguments_.checkpoint, ranks_, cover_, fingerprint_, *trainer_); }

  int interrupted() {
    save();
    if (speaks_) {
      fmt::print(
          stderr,
          "interrupted after step {} of {}, which is saved; the same command with --resume {} "
          "goes on\n",
          trainer_->steps_done(), arguments_.options.steps, arguments_.checkpoint);
    }
    return cli::kExitCancelled;
  }

  int finish() {
    const SparseCounts counts = cli::over_ranks(ranks_, counts_);
    cli::on_every_rank(ranks_, [&] {
      record_.losses = trainer_->losses();
      if (speaks_ && !arguments_.record.empty()) write_record(arguments_.record, record_);
    });
    if (!speaks_) return cli::kExitFine;
    const double below = record_.unigram - record_.held_out.back().second;
    fmt::print("after {} steps: held-out loss {:.4f}, {:.4f} {} the frequency of words alone\n",
               trainer_->steps_done(), record_.held_out.back().second, std::abs(below),
               below < 0 ? "above" : "below");
    if (steps_timed_ > 0) {
      fmt::print(
          "{} for {} steps, {} words/s; {} on {} rank{}\n", cli::format_seconds(record_.seconds),
          steps_timed_, cli::format_count(static_cast<int64_t>(record_.tokens_per_second)),
          cli::format_bytes(record_.memory_bytes), record_.ranks, record_.ranks == 1 ? "" : "s");
    }
    if (counts.rows > 0) {
      const auto percent = [](int64_t part, int64_t all) {
        return 100 * static_cast<double>(part) / static_cast<double>(std::max<int64_t>(all, 1));
      };
      fmt::print(
          "sparse gradients: {:.2f} % of grad_logits kept, beside {:.1f} % of the words exact\n",
          percent(counts.kept, counts.elements), percent(counts.dense_rows, counts.rows));
    }
    return fine_ ? cli::kExitFine : cli::kExitVerificationFailed;
  }

  static double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

  const TrainArguments& arguments_;
  Communicator& ranks_;
  bool speaks_;
  const CancelToken& cancel_;
  Text text_;
  std::string fingerprint_;
  std::vector<RowRange> cover_;
  std::unique_ptr<Trainer> trainer_;
  Record record_;
  int64_t steps_timed_ = 0;
  SparseCounts counts_;  // of those steps, of this rank's rows of the head
  bool fine_ = true;     // the first step, on rank 0
};

}  // namespace

int train(const TrainArguments& arguments) { return Training(arguments).run(); }

}  // namespace logitless::train_lm
