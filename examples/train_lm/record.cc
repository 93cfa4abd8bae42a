// SPDX-License-Identifier: Apache-2.0
#include "examples/train_lm/record.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cli/failure.h"
#include "cli/files.h"
#include "cli/units.h"

namespace logitless::train_lm {
namespace {

constexpr const char* kSchema = "logitless-train-lm-1";

}  // namespace

void write_record(const std::string& path, const Record& record) {
  nlohmann::ordered_json judged = nlohmann::ordered_json::array();
  for (const Record::Judged& output : record.first_step) {
    judged.push_back({{"output", output.output},
                      {"observed", output.observed},
                      {"allowed", output.allowed},
                      {"fine", output.fine}});
  }
  const nlohmann::ordered_json document = {{"schema", kSchema},
                                           {"options", record.options},
                                           {"text", record.text},
                                           {"V", record.V},
                                           {"ranks", record.ranks},
                                           {"cuts", record.cuts},
                                           {"isa", record.isa},
                                           {"threads", record.threads},
                                           {"unigram", record.unigram},
                                           {"losses", record.losses},
                                           {"held_out", record.held_out},
                                           {"first_step", judged},
                                           {"exact_first_loss", record.exact_first_loss},
                                           {"seconds", record.seconds},
                                           {"tokens_per_second", record.tokens_per_second},
                                           {"memory_bytes", record.memory_bytes}};
  const std::string text = document.dump(1) + "\n";
  cli::OutputFile file = cli::take(cli::OutputFile::create(path));
  cli::take(file.write(text.data(), text.size(), nullptr));
  cli::take(file.commit());
}

Record read_record(const std::string& path) {
  const cli::InputFile file = cli::take(cli::InputFile::open(path));
  std::string text(file.size(), '\0');
  cli::take(file.read(0, text.data(), file.size()));
  Record record;
  try {
    const auto document = nlohmann::json::parse(text);
    if (document.at("schema") != kSchema) {
      cli::fail(fmt::format("{}: schema is {}, must be \"{}\"", cli::printable(path),
                            cli::printable(document["schema"].dump()), kSchema));
    }
    document.at("options").get_to(record.options);
    document.at("text").get_to(record.text);
    document.at("V").get_to(record.V);
    document.at("ranks").get_to(record.ranks);
    document.at("cuts").get_to(record.cuts);
    document.at("isa").get_to(record.isa);
    document.at("threads").get_to(record.threads);
    document.at("unigram").get_to(record.unigram);
    document.at("losses").get_to(record.losses);
    document.at("held_out").get_to(record.held_out);
    for (const auto& output : document.at("first_step")) {
      record.first_step.push_back({.output = output.at("output").get<std::string>(),
                                   .observed = output.at("observed").get<double>(),
                                   .allowed = output.at("allowed").get<double>(),
                                   .fine = output.at("fine").get<bool>()});
    }
    document.at("exact_first_loss").get_to(record.exact_first_loss);
    document.at("seconds").get_to(record.seconds);
    document.at("tokens_per_second").get_to(record.tokens_per_second);
    document.at("memory_bytes").get_to(record.memory_bytes);
  } catch (const nlohmann::json::exception& error) {
    cli::fail(fmt::format("{}: is no record of a run: {}", cli::printable(path), error.what()));
  }
  return record;
}

}  // namespace logitless::train_lm
