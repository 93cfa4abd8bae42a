# SPDX-License-Identifier: Apache-2.0
# Source this file (". set_env.sh"): it points ASCEND_HOME_PATH, ASCEND_TOOLKIT_HOME and
# LD_LIBRARY_PATH to the folder it lies in. Sourcing it again changes nothing.

# Where this file is. bash and zsh say so; any other shell (dash, ash) has it open right now.
if [ -n "${BASH_SOURCE:-}" ]; then
  _logitless_self=$BASH_SOURCE
elif [ -n "${ZSH_VERSION:-}" ]; then
  eval '_logitless_self=${(%):-%x}'
else
  _logitless_self=
  # $$ would be the main shell even inside ( ... ), whose own process it is that has the file open.
  _logitless_pid=$(exec sh -c 'echo "$PPID"')
  for _logitless_fd in "/proc/$_logitless_pid/fd/"*; do
    _logitless_link=$(readlink "$_logitless_fd" 2>/dev/null) || continue
    case $_logitless_link in
      */set_env.sh)
        if [ -e "${_logitless_link%/*}/lib64/liblogitless_ascend.so" ]; then
          _logitless_self=$_logitless_link
        fi ;;
    esac
  done
  unset _logitless_pid _logitless_fd _logitless_link
fi

case $_logitless_self in
  */*) _logitless_home=$(CDPATH= cd -- "${_logitless_self%/*}" && pwd) ;;
  ?*) _logitless_home=$(pwd) ;;
  *) _logitless_home= ;;
esac

if [ -n "$_logitless_home" ] && [ -e "$_logitless_home/lib64/liblogitless_ascend.so" ]; then
  export ASCEND_HOME_PATH="$_logitless_home"
  export ASCEND_TOOLKIT_HOME="$_logitless_home"
  case ":${LD_LIBRARY_PATH:-}:" in
    *":$_logitless_home/lib64:"*) ;;
    *) export LD_LIBRARY_PATH="$_logitless_home/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" ;;
  esac
else
  echo "set_env.sh: cannot tell where it is; source it with its path, from bash" >&2
fi
unset _logitless_self _logitless_home
