// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace logitless::train_lm {

// What a run tells of itself, as JSON: what `compare` reads and the picture is drawn from.
struct Record {
  // An output of the first step against float64: its worst element.
  struct Judged {
    std::string output;
    double observed = 0;
    double allowed = 0;
    bool fine = false;
  };

  std::map<std::string, std::string> options;
  std::string text;  // fingerprint
  int64_t V = 0;
  int64_t ranks = 0;
  std::vector<int64_t> cuts;  // where each rank's rows begin, and where the last one's end
  std::string isa;
  int64_t threads = 0;                               // of a rank
  double unigram = 0;                                // nats, of the held-out words
  std::vector<double> losses;                        // of every step
  std::vector<std::pair<int64_t, double>> held_out;  // after step, loss
  std::vector<Judged> first_step;                    // empty where the run was resumed
  double exact_first_loss = 0;
  double seconds = 0;  // of training, the float64 check left out
  double tokens_per_second = 0;
  int64_t memory_bytes = 0;  // resident, all ranks together, at the end
};

// Both throw cli::Failure, which names the file.
void write_record(const std::string& path, const Record& record);
Record read_record(const std::string& path);

}  // namespace logitless::train_lm
