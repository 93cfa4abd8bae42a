// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace logitless::cli::test {

struct ProgramResult {
  int exit_code = -1;  // 128 + signal when one ended it
  std::string out;
  std::string err;
};

// The built program, as a child process; nothing passes through a shell.
class Program {
 public:
  // Starts it; environment: "NAME=value" on top of this process's. out: where its stdout goes, if
  // not into the result.
  explicit Program(std::vector<std::string> arguments, std::vector<std::string> environment = {},
                   const std::string& out = "");
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // Waits until the program handles `signal` itself, at most half a minute.
  void wait_for_handler(int signal) const;
  void send(int signal) const;
  ProgramResult wait();

 private:
  pid_t pid_ = -1;
  std::string folder_;
};

ProgramResult run_program(std::vector<std::string> arguments,
                          std::vector<std::string> environment = {}, const std::string& out = "");

}  // namespace logitless::cli::test
