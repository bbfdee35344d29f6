"""Inside the container: ask umad-serve for one embedding; prints the status and the dimension."""

import json
import urllib.error
import urllib.request

URL = "http://127.0.0.1:8600/v1/embeddings"


def main() -> None:
    """One request."""
    body = json.dumps({"model": "minilm", "input": "memory is a contract"}).encode()
    request = urllib.request.Request(URL, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            print(answer.status, len(json.load(answer)["data"][0]["embedding"]))
    except urllib.error.HTTPError as refusal:
        print(refusal.code)


main()
