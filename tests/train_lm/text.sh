# SPDX-License-Identifier: Apache-2.0
# Sourced by the tests of the program.

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

# small_text WORDS: text in which the next word can mostly be guessed from the one before it.
small_text() {
  awk -v words="$1" 'BEGIN {
    state = 1
    for (i = 0; i < words; ++i) {
      state = (state * 1103 + 12345) % 65536
      word = state % 10 < 8 ? (word * 7 + 3) % 131 : int(state / 10) % 131
      printf "w%d%s", word, i % 12 == 11 ? ".\n" : " "
    }
  }'
}

# Seconds, not minutes; what is left is learned fast.
small=(--context 2 --embedding 16 --hidden 64 --batch 128 --rate 0.02 --warm-up 5 --dropout 0.1)
