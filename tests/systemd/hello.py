"""Inside the container: say hello on the socket, ask one more thing, print the answers as JSON.

hello.py [METHOD]; prints the errno's name where the socket cannot be used.
"""

import errno
import json
import socket
import sys

import msgpack


def main() -> None:
    """One connection, one or two requests."""
    requests = [["hello", {"versions": [1], "client": "test"}]]
    requests += [[method, {}] for method in sys.argv[1:]]
    answers = msgpack.Unpacker()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(10)
    try:
        sock.connect("/run/umad/umad.sock")
        for number, (method, params) in enumerate(requests):
            sock.sendall(msgpack.packb([0, number, method, [params]]))
            while (answer := next(answers, None)) is None:
                answers.feed(sock.recv(65536) or sys.exit("closed"))
            print(json.dumps(answer[3] if answer[2] is None else answer[2]))
    except OSError as error:
        print(errno.errorcode.get(error.errno or 0, str(error)))


main()
